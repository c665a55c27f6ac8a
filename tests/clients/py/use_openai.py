"""The `openai` package: chat completions and responses."""

from __future__ import annotations

import json
from typing import Any

from openai import OpenAI
from seen import Place, main

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


class Chat:
    def __init__(self, place: Place) -> None:
        self.model = place.model
        self.client = OpenAI(base_url=f"{place.url}/v1", api_key="any", default_headers=place.headers)

    def plain(self, question: str, tokens: int) -> str:
        answer = self.client.chat.completions.create(
            model=self.model, messages=[{"role": "user", "content": question}], max_tokens=tokens
        )
        return answer.choices[0].message.content or ""

    def streamed(self, question: str, tokens: int, most: int | None) -> list[str]:
        pieces = []
        with self.client.chat.completions.create(
            model=self.model, messages=[{"role": "user", "content": question}], max_tokens=tokens, stream=True
        ) as stream:
            for chunk in stream:
                if text := chunk.choices[0].delta.content:
                    pieces.append(text)
                if len(pieces) == most:
                    break
        return pieces

    def tools(self, question: str) -> dict[str, Any]:
        messages: list[Any] = [{"role": "user", "content": question}]
        tools: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
        asked = self.client.chat.completions.create(model=self.model, messages=messages, tools=tools)
        [call] = asked.choices[0].message.tool_calls or []
        messages += [asked.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}]
        told = self.client.chat.completions.create(model=self.model, messages=messages, tools=tools)
        arguments = json.loads(call.function.arguments)
        return {"name": call.function.name, "arguments": arguments, "text": told.choices[0].message.content}


class Responses:
    def __init__(self, place: Place) -> None:
        self.model = place.model
        self.client = OpenAI(base_url=f"{place.url}/v1", api_key="any", default_headers=place.headers)

    def plain(self, question: str, tokens: int) -> str:
        return self.client.responses.create(model=self.model, input=question, max_output_tokens=tokens).output_text

    def streamed(self, question: str, tokens: int, most: int | None) -> list[str]:
        pieces = []
        with self.client.responses.create(
            model=self.model, input=question, max_output_tokens=tokens, stream=True
        ) as stream:
            for event in stream:
                if event.type == "response.output_text.delta":
                    pieces.append(event.delta)
                if len(pieces) == most:
                    break
        return pieces

    def tools(self, question: str) -> dict[str, Any]:
        tools: list[Any] = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}]
        asked = self.client.responses.create(model=self.model, input=question, tools=tools)
        [call] = asked.output
        turns: list[Any] = [{"role": "user", "content": question}, call]
        turns.append({"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"})
        told = self.client.responses.create(model=self.model, input=turns, tools=tools)
        return {"name": call.name, "arguments": json.loads(call.arguments), "text": told.output_text}


main({"chat": Chat, "responses": Responses})
