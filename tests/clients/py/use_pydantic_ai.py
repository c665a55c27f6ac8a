"""Pydantic AI: agents over OpenAI's two APIs and Anthropic's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic_ai import Agent
from pydantic_ai.messages import ToolCallPart
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from seen import Place, main


class Agents:
    def __init__(self, model: Callable[[Place], Model]) -> None:
        self.model = model

    def __call__(self, place: Place) -> Agents.Placed:
        return self.Placed(self.model, place)

    class Placed:
        def __init__(self, model: Callable[[Place], Model], place: Place) -> None:
            self.model, self.place = model, place

        def agent(self) -> Agent[None, str]:
            return Agent(self.model(self.place))

        def plain(self, question: str, tokens: int) -> str:
            async def run() -> str:
                return (await self.agent().run(question, model_settings=ModelSettings(max_tokens=tokens))).output

            return asyncio.run(run())

        def streamed(self, question: str, tokens: int, most: int | None) -> list[str]:
            async def run() -> list[str]:
                pieces = []
                settings = ModelSettings(max_tokens=tokens)
                async with self.agent().run_stream(question, model_settings=settings) as stream:
                    async for text in stream.stream_text(delta=True, debounce_by=None):
                        pieces.append(text)
                        if len(pieces) == most:
                            break
                return pieces

            return asyncio.run(run())

        def tools(self, question: str) -> dict[str, Any]:
            async def run() -> dict[str, Any]:
                agent = self.agent()

                @agent.tool_plain
                def weather(city: str) -> str:
                    return "21 degrees"

                result = await agent.run(question)
                parts = [part for message in result.all_messages() for part in message.parts]
                [call] = [part for part in parts if isinstance(part, ToolCallPart)]
                return {"name": call.tool_name, "arguments": call.args_as_dict(), "text": result.output}

            return asyncio.run(run())


def openai(place: Place) -> OpenAIProvider:
    return OpenAIProvider(
        openai_client=AsyncOpenAI(base_url=f"{place.url}/v1", api_key="any", default_headers=place.headers)
    )


def anthropic(place: Place) -> AnthropicProvider:
    return AnthropicProvider(
        anthropic_client=AsyncAnthropic(base_url=place.url, api_key="any", default_headers=place.headers)
    )


main(
    {
        "chat": Agents(lambda place: OpenAIChatModel(place.model, provider=openai(place))),
        "responses": Agents(lambda place: OpenAIResponsesModel(place.model, provider=openai(place))),
        "messages": Agents(lambda place: AnthropicModel(place.model, provider=anthropic(place))),
    }
)
