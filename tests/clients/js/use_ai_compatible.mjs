// Vercel's `ai` with its provider for servers that are compatible with OpenAI.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { client, options } from "./ai.mjs";
import { main } from "./seen.mjs";

await main({
  chat: (place) => client(createOpenAICompatible({ name: "fleet", ...options(place) })(place.model)),
});
