"""A mock worker as Dynamo's frontend wants it: registered in Dynamo's discovery, asked in tokens, its KV events told in
Dynamo's way. Runs with the Python that `make bench-peers` gives Dynamo, where nothing of ours is installed.

A token is a byte here, so that a text is cut into tokens alike by Dynamo's frontend, by its router and by the worker,
whose tokens are four bytes each. What a block is stays the same: so many bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import re
import struct
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

MODEL = "mock-model"
TOKEN_BYTES = 4
"""Of a token of the mock worker's."""
END = 256
"""The token that ends what is said. Those below it are bytes."""
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\\n' }}"
)
"""The mock worker's."""
READY = "the model is registered"
_message = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", re.DOTALL).findall


def write_model(folder: Path) -> None:
    """What Dynamo reads of a model: a tokenizer of bytes, a template, a length."""
    folder.mkdir(exist_ok=True)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    letters = [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    files: dict[str, Any] = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": END + 1,
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "max_position_embeddings": 1 << 20,
            "eos_token_id": END,
            "bos_token_id": END,
        },
        "generation_config.json": {"eos_token_id": END},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|end|>",
            "model_max_length": 1 << 20,
            "chat_template": TEMPLATE,
        },
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": [{"id": END, "content": "<|end|>", **special}],
            "pre_tokenizer": level,
            "decoder": level,
            "model": {
                "type": "BPE",
                "vocab": {letter: byte for byte, letter in enumerate(letters)} | {"<|end|>": END},
                "merges": [],
            },
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), "utf-8")


def session_of(messages: list[dict[str, str]]) -> str:
    """A name for who asks: it goes by what the user said first."""
    first = next((each["content"] for each in messages if each["role"] == "user"), "")
    return hashlib.sha256(first.encode()).hexdigest()[:32]


class Bridge:
    """Of one worker."""

    def __init__(self, url: str, http: Any) -> None:
        self._url, self._http = url, http

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        """As Dynamo asks for it: tokens in, tokens out."""
        text = bytes(token for token in request["token_ids"] if token < END).decode()
        messages = [{"role": role, "content": said} for role, said in _message(text)]
        most = (request.get("stop_conditions") or {}).get("max_tokens")
        body = {
            "model": MODEL,
            "messages": messages,
            "max_tokens": most,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        usage: dict[str, Any] = {}
        headers = {"x-dynamo-session-id": session_of(messages)}
        async with self._http.post(f"{self._url}/v1/chat/completions", json=body, headers=headers) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    continue
                event = json.loads(data)
                usage = event.get("usage") or usage
                said = "".join(choice.get("delta", {}).get("content") or "" for choice in event.get("choices", ()))
                if said:
                    yield {"token_ids": list(said.encode())}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        told = {
            "prompt_tokens": len(request["token_ids"]),
            "completion_tokens": usage.get("completion_tokens", 0),
            "total_tokens": len(request["token_ids"]) + usage.get("completion_tokens", 0),
            "prompt_tokens_details": {"cached_tokens": cached * TOKEN_BYTES},
        }
        yield {"token_ids": [END], "finish_reason": "stop", "completion_usage": told}


def _signed(number: int | None) -> int | None:
    return None if number is None else struct.unpack("<q", struct.pack("<Q", number))[0]


async def _tell(events: str, publisher: Any) -> None:
    """What the worker says of its blocks, in Dynamo's words."""
    import msgspec
    import zmq
    import zmq.asyncio

    socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(events)
    while True:
        *_, payload = await socket.recv_multipart()
        for event in msgspec.msgpack.decode(payload)[1]:
            hashes = [_signed(each) for each in event.get("block_hashes", ())]
            if event["type"] == "BlockStored":
                width = event["block_size"] * TOKEN_BYTES
                text = b"".join(token.to_bytes(TOKEN_BYTES, "little") for token in event["token_ids"])
                publisher.publish_stored(list(text), [width] * len(hashes), hashes, _signed(event["parent_block_hash"]))
            elif event["type"] == "BlockRemoved":
                publisher.publish_removed(hashes)


async def serve(url: str, events: str, block_bytes: int, blocks: int, model: Path) -> None:
    import aiohttp
    from dynamo.llm import KvEventPublisher, ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model
    from dynamo.runtime import DistributedRuntime

    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    endpoint = runtime.endpoint("bench.mock.generate")
    config = ModelRuntimeConfig()
    config.total_kv_blocks = blocks
    config.max_num_seqs, config.max_num_batched_tokens = 256, 8192 * TOKEN_BYTES
    config.enable_local_indexer = True
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        serving = asyncio.ensure_future(endpoint.serve_endpoint(Bridge(url, http).generate))
        publisher = KvEventPublisher(endpoint, kv_block_size=block_bytes, enable_local_indexer=True)
        telling = asyncio.ensure_future(_tell(events, publisher))
        await register_model(
            ModelInput.Tokens,
            ModelType.Chat,
            endpoint,
            str(model),
            MODEL,
            worker_type=WorkerType.Aggregated,
            kv_cache_block_size=block_bytes,
            runtime_config=config,
        )
        print(READY, flush=True)
        await asyncio.wait([serving, telling], return_when=asyncio.FIRST_COMPLETED)
        for each in (serving, telling):
            if each.done():
                each.result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", required=True, metavar="URL")
    parser.add_argument("--events", required=True, metavar="URL", help="where it tells of its blocks")
    parser.add_argument("--block-bytes", type=int, required=True)
    parser.add_argument("--blocks", type=int, required=True, help="of the worker")
    parser.add_argument("--model", type=Path, required=True, help="the folder that `write_model` has filled")
    args = parser.parse_args()
    asyncio.run(serve(args.worker, args.events, args.block_bytes, args.blocks, args.model))
    return 0


if __name__ == "__main__":
    sys.exit(main())
