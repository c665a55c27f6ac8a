"""LangChain: `langchain-openai` (both of its APIs) and `langchain-anthropic`."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from seen import Place, main


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return "21 degrees"


class Model:
    def __init__(self, model: BaseChatModel) -> None:
        self.model = model

    def plain(self, question: str, tokens: int) -> str:
        return str(self.model.bind(max_tokens=tokens).invoke(question).text)

    def streamed(self, question: str, tokens: int, most: int | None) -> list[str]:
        pieces = []
        with closing(self.model.bind(max_tokens=tokens).stream(question)) as stream:  # type: ignore[type-var]
            for chunk in stream:
                if text := str(chunk.text):
                    pieces.append(text)
                if len(pieces) == most:
                    break
        return pieces

    def tools(self, question: str) -> dict[str, Any]:
        bound = self.model.bind_tools([weather])
        asked = bound.invoke([HumanMessage(question)])
        assert isinstance(asked, AIMessage)
        [call] = asked.tool_calls
        result = weather.invoke(call)
        assert isinstance(result, ToolMessage)
        told = bound.invoke([HumanMessage(question), asked, result])
        return {"name": call["name"], "arguments": call["args"], "text": str(told.text)}


def openai(place: Place, **options: Any) -> Model:
    return Model(
        ChatOpenAI(
            base_url=f"{place.url}/v1", api_key="any", model=place.model, default_headers=place.headers, **options
        )
    )


def anthropic(place: Place) -> Model:
    return Model(ChatAnthropic(base_url=place.url, api_key="any", model=place.model, default_headers=place.headers))


main({"chat": openai, "responses": lambda place: openai(place, use_responses_api=True), "messages": anthropic})
