"""LlamaIndex: `OpenAILike`, its class for servers that speak OpenAI's API."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from seen import Place, main


def weather(city: str) -> str:
    """The weather in a city."""
    return "21 degrees"


class Chat:
    def __init__(self, place: Place) -> None:
        self.model = OpenAILike(
            model=place.model,
            api_base=f"{place.url}/v1",
            api_key="any",
            default_headers=place.headers,
            is_chat_model=True,
            is_function_calling_model=True,
        )

    def plain(self, question: str, tokens: int) -> str:
        answer = self.model.chat([ChatMessage(role="user", content=question)], max_tokens=tokens)
        return answer.message.content or ""

    def streamed(self, question: str, tokens: int, most: int | None) -> list[str]:
        pieces = []
        answers = self.model.stream_chat([ChatMessage(role="user", content=question)], max_tokens=tokens)
        with closing(answers) as stream:  # type: ignore[type-var]
            for answer in stream:
                if answer.delta:
                    pieces.append(answer.delta)
                if len(pieces) == most:
                    break
        return pieces

    def tools(self, question: str) -> dict[str, Any]:
        asked = self.model.chat_with_tools([FunctionTool.from_defaults(weather)], user_msg=question)
        [call] = self.model.get_tool_calls_from_response(asked)
        result = ChatMessage(role="tool", content=weather("Oslo"), additional_kwargs={"tool_call_id": call.tool_id})
        told = self.model.chat([ChatMessage(role="user", content=question), asked.message, result])
        return {"name": call.tool_name, "arguments": call.tool_kwargs, "text": told.message.content}


main({"chat": Chat})
