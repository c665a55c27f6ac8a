// Vercel's `ai` with its providers for OpenAI's two APIs and for Anthropic's.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { client, options } from "./ai.mjs";
import { main } from "./seen.mjs";

await main({
  chat: (place) => client(createOpenAI(options(place)).chat(place.model)),
  responses: (place) => client(createOpenAI(options(place)).responses(place.model)),
  messages: (place) => client(createAnthropic(options(place))(place.model)),
});
