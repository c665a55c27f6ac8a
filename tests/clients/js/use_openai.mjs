// openai-node: chat completions and responses.

import OpenAI from "openai";
import { main } from "./seen.mjs";

const PARAMETERS = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };

const client = (place) => new OpenAI({ baseURL: `${place.url}/v1`, apiKey: "any", defaultHeaders: place.headers });

const chat = (place) => {
  const { completions } = client(place).chat;
  const base = { model: place.model };
  return {
    async plain(question, tokens) {
      const messages = [{ role: "user", content: question }];
      const answer = await completions.create({ ...base, messages, max_tokens: tokens });
      return answer.choices[0].message.content;
    },
    async streamed(question, tokens, most) {
      const messages = [{ role: "user", content: question }];
      const pieces = [];
      for await (const chunk of await completions.create({ ...base, messages, max_tokens: tokens, stream: true })) {
        if (chunk.choices[0].delta.content) pieces.push(chunk.choices[0].delta.content);
        if (pieces.length === most) break;
      }
      return pieces;
    },
    async tools(question) {
      const tools = [{ type: "function", function: { name: "weather", parameters: PARAMETERS } }];
      const messages = [{ role: "user", content: question }];
      const asked = (await completions.create({ ...base, messages, tools })).choices[0].message;
      const [call] = asked.tool_calls;
      messages.push(asked, { role: "tool", tool_call_id: call.id, content: "21 degrees" });
      const answer = (await completions.create({ ...base, messages, tools })).choices[0].message;
      return { name: call.function.name, arguments: JSON.parse(call.function.arguments), text: answer.content };
    },
  };
};

const responses = (place) => {
  const { responses } = client(place);
  const base = { model: place.model };
  return {
    async plain(question, tokens) {
      return (await responses.create({ ...base, input: question, max_output_tokens: tokens })).output_text;
    },
    async streamed(question, tokens, most) {
      const pieces = [];
      const request = { ...base, input: question, max_output_tokens: tokens, stream: true };
      for await (const event of await responses.create(request)) {
        if (event.type === "response.output_text.delta") pieces.push(event.delta);
        if (pieces.length === most) break;
      }
      return pieces;
    },
    async tools(question) {
      const tools = [{ type: "function", name: "weather", parameters: PARAMETERS, strict: false }];
      const input = [{ role: "user", content: question }];
      const [call] = (await responses.create({ ...base, input, tools })).output;
      input.push(call, { type: "function_call_output", call_id: call.call_id, output: "21 degrees" });
      const answer = await responses.create({ ...base, input, tools });
      return { name: call.name, arguments: JSON.parse(call.arguments), text: answer.output_text };
    },
  };
};

await main({ chat, responses });
