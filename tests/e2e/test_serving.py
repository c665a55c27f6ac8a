"""Which model decides where a turn goes, with real processes: two replicas, claims in files, mock workers. What counts
is what the workers say that they served."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from tests.e2e.conftest import new_session
from tests.support.processes import Processes, Replica, Worker, turns, wait_until
from tests.support.wire import Answer, ask, turn

MODELS: Sequence[Sequence[str]] = (["a"], ["a", "org/b"], ["org/b"], ["c"], ["c"])
"""Three models over five workers, one of which serves two."""
OPTIONS = ("--probe-interval=0.3", "--model-alias=small=c")


def start(processes: Processes, *models: Sequence[str]) -> list[Worker]:
    workers = []
    for number, names in enumerate(models):
        options = [f"--model={name}" for name in names]
        workers.append(replace(processes.workers(1, *options, "--ttft-ms=1", "--itl-ms=1")[0], name=f"w{number}"))
    return workers


async def models_of(replica: Replica) -> list[str]:
    answer = await ask(replica.url, target="/v1/models")
    return sorted(each["id"] for each in answer.json["data"])


async def lists(replica: Replica, *models: str) -> None:
    """Returns when it knows these: workers that take their time are not waited for at its start."""

    async def listed() -> bool:
        return await models_of(replica) == list(models)

    await wait_until(listed, 30)


def code(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.json["error"]["code"]


async def test_three_models_over_five_workers(processes: Processes) -> None:
    workers = start(processes, *MODELS)
    replicas = processes.replicas(2, workers, processes.folder / "claims", *OPTIONS)
    for replica in replicas:
        await lists(replica, "a", "c", "org/b", "small")
        for target in ("/v1/models/org/b", "/v1/models/org%2Fb"):
            assert (await ask(replica.url, target=target)).json["id"] == "org/b"
    for number in range(36):
        model = ("a", "org/b", "c", "small")[number % 4]
        session = new_session() if number % 3 else None
        answer = await turn(replicas[number % 2].url, session=session, model=model)
        assert answer.status == 200, (model, answer.body)
    served = [{each["model"] for each in await turns(worker)} for worker in workers]
    assert served == [set(names) for names in MODELS]

    # An adapter is loaded at one worker, past the routers; both replicas find it, and a session keeps what it has.
    session = new_session()
    first = await turn(replicas[0].url, session=session, model="c")
    loaded = await ask(
        workers[0].url, "POST", "/v1/load_lora_adapter", [("content-type", "application/json")],
        json.dumps({"lora_name": "lora", "lora_path": "/nowhere"}).encode(),
    )  # fmt: skip
    assert loaded.status == 200
    for replica in replicas:
        assert (await turn(replica.url, session=session, model="lora")).worker == "w0"
        assert (await turn(replica.url, session=session, model="c")).worker == first.worker
    assert [each["model"] for each in await turns(workers[0], session)] == ["lora"] * 2
    assert code(await turn(replicas[0].url, model="never")) == (404, "model_not_found")

    # Another one by an admin, through a replica: the other one hears of it as well.
    headers = [("host", "localhost"), ("content-type", "application/json"), ("x-dynamo-worker-instance-id", "w1")]
    body = json.dumps({"lora_name": "second", "lora_path": "/nowhere"}).encode()
    assert (await ask(replicas[0].url, "POST", "/v1/load_lora_adapter", headers, body)).status == 200

    async def known() -> bool:
        return all(["second" in await models_of(replica) for replica in replicas])

    await wait_until(known, 30)


async def test_a_model_whose_only_worker_is_down(processes: Processes) -> None:
    """At both replicas, and right after a restart."""
    workers = start(processes, ["a"], ["b"])
    claims = processes.folder / "claims"
    replicas = processes.replicas(2, workers, claims, *OPTIONS)
    for replica in replicas:
        await lists(replica, "a", "b")
    workers[1].process.kill()

    async def told(model: str, replica: Replica) -> int:
        return (await turn(replica.url, model=model)).status

    for replica in replicas:
        assert [await told(model, replica) for model in ("b", "never", "a")] == [503, 404, 200]
    for replica in replicas:
        replica.process.kill()
    for replica in processes.replicas(2, workers, claims, *OPTIONS):
        assert [await told(model, replica) for model in ("b", "never", "a")] == [503, 404, 200]
        assert await models_of(replica) == ["a", "b"]
        anthropic = await ask(
            replica.url, "POST", "/v1/messages", [("content-type", "application/json")], b'{"model":"never"}'
        )
        assert anthropic.json["error"]["type"] == "not_found_error"
