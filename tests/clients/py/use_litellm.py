"""LiteLLM as a library: one function for three providers' APIs."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import litellm
from seen import Place, main

litellm.telemetry = False


class Completion:
    """`litellm.completion`."""

    def __init__(self, place: Place, model: str, url: str) -> None:
        self.options: dict[str, Any] = {
            "model": model,
            "api_base": url,
            "api_key": "any",
            "extra_headers": place.headers,
        }

    def plain(self, question: str, tokens: int) -> str:
        answer = litellm.completion(messages=[{"role": "user", "content": question}], max_tokens=tokens, **self.options)
        return answer.choices[0].message.content or ""

    def streamed(self, question: str, tokens: int, most: int | None) -> list[str]:
        pieces = []
        stream = litellm.completion(
            messages=[{"role": "user", "content": question}], max_tokens=tokens, stream=True, **self.options
        )
        for chunk in stream:
            if text := chunk.choices[0].delta.content:
                pieces.append(text)
            if len(pieces) == most:
                leave(stream)
                break
        return pieces

    def tools(self, question: str) -> dict[str, Any]:
        schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
        tools = [{"type": "function", "function": {"name": "weather", "description": "It.", "parameters": schema}}]
        messages: list[Any] = [{"role": "user", "content": question}]
        asked = litellm.completion(messages=messages, tools=tools, **self.options).choices[0].message
        [call] = asked.tool_calls
        messages += [asked, {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}]
        told = litellm.completion(messages=messages, tools=tools, **self.options).choices[0].message
        arguments = json.loads(call.function.arguments)
        return {"name": call.function.name, "arguments": arguments, "text": told.content}


class Responses:
    """`litellm.responses`."""

    def __init__(self, place: Place) -> None:
        # Else it asks for a whole response and cuts that into pieces, as it does with every model that it does not
        # know. Not for all: `litellm.completion` of a model of this mode asks for responses too.
        known = {"litellm_provider": "openai", "mode": "responses", "supports_native_streaming": True}
        litellm.register_model({f"openai/{place.model}": known})
        self.options: dict[str, Any] = {
            "model": f"openai/{place.model}",
            "api_base": f"{place.url}/v1",
            "api_key": "any",
            "extra_headers": place.headers,
        }

    def plain(self, question: str, tokens: int) -> str:
        return text_of(litellm.responses(input=question, max_output_tokens=tokens, **self.options))

    def streamed(self, question: str, tokens: int, most: int | None) -> list[str]:
        pieces = []
        stream = litellm.responses(input=question, max_output_tokens=tokens, stream=True, **self.options)
        for event in stream:
            if event.type == "response.output_text.delta":
                pieces.append(event.delta)
            if len(pieces) == most:
                leave(stream)
                break
        return pieces

    def tools(self, question: str) -> dict[str, Any]:
        schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
        tools: list[Any] = [{"type": "function", "name": "weather", "parameters": schema, "strict": False}]
        asked = litellm.responses(input=question, tools=tools, **self.options)
        [call] = asked.output
        turns: list[Any] = [{"role": "user", "content": question}, call.model_dump(exclude_none=True)]
        turns.append({"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"})
        told = litellm.responses(input=turns, tools=tools, **self.options)
        return {"name": call.name, "arguments": json.loads(call.arguments), "text": text_of(told)}


def text_of(answer: Any) -> str:
    return "".join(part.text for item in answer.output if item.type == "message" for part in item.content)


def leave(stream: Any) -> None:
    """Its streams have no close of their own; what they wrap has."""
    for name in ("completion_stream", "response"):
        with suppress(AttributeError):
            getattr(stream, name).close()


main(
    {
        "chat": lambda place: Completion(place, f"openai/{place.model}", f"{place.url}/v1"),
        "responses": Responses,
        "messages": lambda place: Completion(place, f"anthropic/{place.model}", place.url),
    }
)
