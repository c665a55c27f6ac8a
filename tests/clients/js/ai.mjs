// What Vercel's `ai` does with a model of any of its providers.

import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

export const client = (model) => ({
  async plain(question, tokens) {
    return (await generateText({ model, prompt: question, maxOutputTokens: tokens })).text;
  },
  async streamed(question, tokens, most) {
    const pieces = [];
    const leaving = new AbortController();
    let failure;
    const { fullStream } = streamText({
      model,
      prompt: question,
      maxOutputTokens: tokens,
      abortSignal: leaving.signal,
      onError: ({ error }) => (failure = error),
    });
    for await (const part of fullStream) {
      if (part.type === "text-delta") pieces.push(part.text);
      if (part.type === "error") throw part.error;
      if (pieces.length === most) {
        leaving.abort();
        break;
      }
    }
    if (failure && most === null) throw failure;
    return pieces;
  },
  async tools(question) {
    const weather = tool({
      description: "The weather in a city",
      inputSchema: z.object({ city: z.string() }),
      execute: async () => "21 degrees",
    });
    const answer = await generateText({ model, prompt: question, tools: { weather }, stopWhen: stepCountIs(3) });
    const [call] = answer.steps[0].toolCalls;
    return { name: call.toolName, arguments: call.input, text: answer.text };
  },
});

export const options = (place) => ({ baseURL: `${place.url}/v1`, apiKey: "any", headers: place.headers });
