// LangChain for JavaScript: @langchain/openai (both of its APIs) and @langchain/anthropic.

import { ChatAnthropic } from "@langchain/anthropic";
import { HumanMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";
import { main } from "./seen.mjs";

const weather = tool(async () => "21 degrees", {
  name: "weather",
  description: "The weather in a city",
  schema: z.object({ city: z.string() }),
});

const client = (model) => ({
  async plain(question, tokens) {
    return (await model(tokens).invoke(question)).text;
  },
  async streamed(question, tokens, most) {
    const pieces = [];
    for await (const chunk of await model(tokens).stream(question)) {
      if (chunk.text) pieces.push(chunk.text);
      if (pieces.length === most) break;
    }
    return pieces;
  },
  async tools(question) {
    const bound = model(99).bindTools([weather]);
    const asked = await bound.invoke([new HumanMessage(question)]);
    const [call] = asked.tool_calls;
    const result = await weather.invoke(call);
    const answer = await bound.invoke([new HumanMessage(question), asked, result]);
    return { name: call.name, arguments: call.args, text: answer.text };
  },
});

const openai = (place, useResponsesApi) =>
  client(
    (maxTokens) =>
      new ChatOpenAI({
        model: place.model,
        apiKey: "any",
        maxTokens,
        useResponsesApi,
        maxRetries: 2,
        configuration: { baseURL: `${place.url}/v1`, defaultHeaders: place.headers },
      }),
  );

const anthropic = (place) =>
  client(
    (maxTokens) =>
      new ChatAnthropic({
        model: place.model,
        apiKey: "any",
        maxTokens,
        maxRetries: 2,
        anthropicApiUrl: place.url,
        clientOptions: { defaultHeaders: place.headers },
      }),
  );

await main({
  chat: (place) => openai(place, false),
  responses: (place) => openai(place, true),
  messages: anthropic,
});
