"""The `anthropic` package."""

from __future__ import annotations

from typing import Any

from anthropic import Anthropic
from seen import Place, main


class Messages:
    def __init__(self, place: Place) -> None:
        self.model = place.model
        self.client = Anthropic(base_url=place.url, api_key="any", default_headers=place.headers)

    def plain(self, question: str, tokens: int) -> str:
        answer = self.client.messages.create(
            model=self.model, max_tokens=tokens, messages=[{"role": "user", "content": question}]
        )
        return "".join(block.text for block in answer.content if block.type == "text")

    def streamed(self, question: str, tokens: int, most: int | None) -> list[str]:
        pieces: list[str] = []
        with self.client.messages.stream(
            model=self.model, max_tokens=tokens, messages=[{"role": "user", "content": question}]
        ) as stream:
            for text in stream.text_stream:
                pieces.append(text)
                if len(pieces) == most:
                    return pieces
            stream.get_final_message()
        return pieces

    def tools(self, question: str) -> dict[str, Any]:
        schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
        tools: list[Any] = [{"name": "weather", "input_schema": schema}]
        messages: list[Any] = [{"role": "user", "content": question}]
        asked = self.client.messages.create(model=self.model, max_tokens=99, messages=messages, tools=tools)
        [call] = asked.content
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "21 degrees"}
        messages += [{"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
        told = self.client.messages.create(model=self.model, max_tokens=99, messages=messages, tools=tools)
        return {"name": call.name, "arguments": call.input, "text": told.content[0].text}


main({"messages": Messages})
