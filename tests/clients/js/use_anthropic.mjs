// @anthropic-ai/sdk.

import Anthropic from "@anthropic-ai/sdk";
import { main } from "./seen.mjs";

const messages = (place) => {
  const { messages } = new Anthropic({ baseURL: place.url, apiKey: "any", defaultHeaders: place.headers });
  const base = { model: place.model };
  const ask = (question, tokens) => ({ ...base, max_tokens: tokens, messages: [{ role: "user", content: question }] });
  return {
    async plain(question, tokens) {
      const answer = await messages.create(ask(question, tokens));
      return answer.content.map((block) => block.text ?? "").join("");
    },
    async streamed(question, tokens, most) {
      const pieces = [];
      for await (const event of await messages.create({ ...ask(question, tokens), stream: true })) {
        if (event.type === "content_block_delta") pieces.push(event.delta.text);
        if (pieces.length === most) break;
      }
      return pieces;
    },
    async tools(question) {
      const schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
      const request = { ...ask(question, 99), tools: [{ name: "weather", input_schema: schema }] };
      const asked = await messages.create(request);
      const [call] = asked.content;
      const result = { type: "tool_result", tool_use_id: call.id, content: "21 degrees" };
      request.messages.push({ role: "assistant", content: asked.content }, { role: "user", content: [result] });
      const answer = await messages.create(request);
      return { name: call.name, arguments: call.input, text: answer.content[0].text };
    },
  };
};

await main({ messages });
