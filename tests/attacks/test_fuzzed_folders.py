"""A fuzz of adapter folders through every way to load one: nothing fails, dies or grows but the number of refusals."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from tests.attacks.live import BOMB, Server, memory_mb, neighbour, serving

HIDDEN = 576  # of the built-in model
RANK = 2
NAME = "base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{factor}.weight"
CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": RANK,
    "lora_alpha": 4,
    "lora_dropout": 0.0,
    "bias": "none",
    "target_modules": ["q_proj"],
    "layers_to_transform": [0, 1],
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "use_rslora": False,
    "use_dora": False,
    "fan_in_fan_out": False,
    "base_model_name_or_path": "built-in",
}
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
# Values of the wrong type, size or meaning, for any field.
STRANGE: list[Any] = [
    *(None, True, -1, 0, 1e308, 10**30, "", "x" * 10_000, "\x00", "../../etc/passwd", BOMB, "(" * 500, "é" * 100),
    *([], [[]], [None], ["q_proj"] * 2000, {}, {"a": {"b": []}}, {BOMB: 4}, {"q_proj": -1}, {"": 10**20}, [0] * 5000),
    *(float("inf"), float("nan"), 2**63, "all-linear", {str(n): n for n in range(500)}),
]


def header_of() -> dict[str, Any]:
    header: dict[str, Any] = {}
    end = 0
    for layer in (0, 1):
        for factor, shape in (("A", [RANK, HIDDEN]), ("B", [HIDDEN, RANK])):
            start, end = end, end + 4 * RANK * HIDDEN
            name = NAME.format(layer=layer, factor=factor)
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    return header


def written(header: bytes, length: int | None = None) -> bytes:
    """A file of safetensors with this header, and numbers that are small."""
    numbers = struct.pack("<f", 0.01) * (4 * RANK * HIDDEN)
    return struct.pack("<Q", (len(header) if length is None else length) % 2**64) + header + numbers


class Folder:
    """One folder on its way to be spoiled."""

    def __init__(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        self.path = path
        self.config: bytes = json.dumps(CONFIG).encode()
        self.weights: bytes = written(json.dumps(header_of()).encode())
        self.extra: dict[str, bytes] = {}
        self.links: dict[str, str] = {}
        self.leaves_out: set[str] = set()

    def write(self) -> None:
        files = {CONFIG_FILE: self.config, WEIGHTS_FILE: self.weights} | self.extra
        for name, content in files.items():
            if name not in self.leaves_out | self.links.keys():
                (self.path / name).write_bytes(content)
        for name, target in self.links.items():
            if target == "fifo":
                os.mkfifo(self.path / name)
            elif target == "folder":
                (self.path / name).mkdir()
            elif target == "sparse":
                with (self.path / name).open("wb") as file:
                    file.truncate(2 << 30)
            else:
                os.symlink(target, self.path / name)


def flipped(content: bytes, random: Random) -> bytes:
    spoiled = bytearray(content or b" ")
    for _ in range(random.randint(1, 8)):
        spoiled[random.randrange(min(len(spoiled), 4000))] = random.randrange(256)
    return bytes(spoiled)


def cut(content: bytes, random: Random) -> bytes:
    return content[: random.randrange(len(content) or 1)]


def spoil_field(folder: Folder, random: Random) -> None:
    config: dict[str, Any] = dict(CONFIG)
    for _ in range(random.randint(1, 3)):
        config[random.choice([*CONFIG, "layers_pattern", "auto_mapping", "init_lora_weights"])] = random.choice(STRANGE)
    folder.config = json.dumps(config).encode()


def drop_field(folder: Folder, random: Random) -> None:
    dropped = random.sample(list(CONFIG), random.randint(1, 4))
    folder.config = json.dumps({name: value for name, value in CONFIG.items() if name not in dropped}).encode()


def spoil_config(folder: Folder, random: Random) -> None:
    deep = random.choice([100, 5000])
    ways = [
        flipped(folder.config, random),
        cut(folder.config, random),
        *(b"", b"[]", b"null", b"\xff\xfe{", b'"a"', b"{" * deep, b"[" * deep + b"]" * deep),
        folder.config.replace(b'"r": 2', b'"r": ' + b"9" * random.choice([20, 400, 5000])),
        folder.config.replace(b'"r": 2', b'"r": 1e' + b"9" * 20),
        folder.config.decode("utf-8", "replace").encode("utf-16"),
        b"\xef\xbb\xbf" + folder.config,
        folder.config[:-1] + b', "r": 3, "r": 2}',
        folder.config + b" " * random.choice([10, 2 << 20]),
    ]
    folder.config = random.choice(ways)


def spoil_header(folder: Folder, random: Random) -> None:
    header = header_of()
    for _ in range(random.randint(1, 3)):
        name = random.choice(list(header))
        part = random.choice(["dtype", "shape", "data_offsets", "name", "all"])
        strange = random.choice(
            [*STRANGE, [0.5, 2.5], [-4, 0], [0, 2**62], [2**63, 2**64], [0, 10**30], ["0", "8"], "F8", "BOOL", [8, 4]]
        )
        if part == "name":
            header[random.choice(["", "__metadata__", name + ".x", "é" * 300, "/" * 50])] = header.pop(name)
        elif part == "all":
            header[name] = strange
        elif isinstance(header[name], dict):
            header[name] = header[name] | {part: strange}
    folder.weights = written(json.dumps(header).encode())


def spoil_weights(folder: Folder, random: Random) -> None:
    header = json.dumps(header_of()).encode()
    ways = [
        flipped(folder.weights, random),
        cut(folder.weights, random),
        folder.weights + random.randbytes(random.randrange(1, 5000)),
        written(header, length=random.choice([0, 1, -1, 2**62, len(header) + 1, len(header) - 1, 10**6])),
        written(b"{" * random.choice([10, 5000]), None),
        written(b"{}" + b" " * random.choice([0, 1000])),
        written(header.replace(b"[2, 576]", b"[" + b"9" * 4000 + b"]")),
        written(header.replace(b"0,", b"0.0,")),
        written(header.replace(b"0,", b"Infinity,")),
        written(b'{"__metadata__": {"a": ' + random.choice([b"1", b"[]", b'"' + b"x" * 10**5 + b'"']) + b"}}"),
        *(b"", b"PK\x03\x04", random.randbytes(100)),
    ]
    folder.weights = random.choice(ways)


def spoil_numbers(folder: Folder, random: Random) -> None:
    number = random.choice([float("nan"), float("inf"), -float("inf"), 3e38, 1e-45])
    at = len(folder.weights) - 4 * random.randint(1, 100)
    folder.weights = folder.weights[:at] + struct.pack("<f", number) + folder.weights[at + 4 :]


def add_index(folder: Folder, random: Random) -> None:
    targets = [WEIGHTS_FILE, "missing.safetensors", "../../birds/secret", "/etc/passwd", "", ".", 3, None, ["a"]]
    index = {"metadata": random.choice(STRANGE), "weight_map": {name: random.choice(targets) for name in header_of()}}
    text = json.dumps(random.choice([index, index["weight_map"], [], {"weight_map": random.choice(STRANGE)}]))
    folder.extra[f"{WEIGHTS_FILE}.index.json"] = text.encode()
    if random.random() < 0.5:
        folder.leaves_out.add(WEIGHTS_FILE)


def link(folder: Folder, random: Random) -> None:
    targets = [
        "/etc/passwd",
        "/dev/zero",
        "../../birds/secret",
        "nothing",
        WEIGHTS_FILE,
        ".",
        "fifo",
        "folder",
        "sparse",
    ]
    folder.links[random.choice([CONFIG_FILE, WEIGHTS_FILE])] = random.choice(targets)


def leave_out(folder: Folder, random: Random) -> None:
    folder.leaves_out.update(random.sample([CONFIG_FILE, WEIGHTS_FILE], random.randint(1, 2)))
    folder.extra[random.choice(["adapter_model.bin", "model.safetensors", "README.md"])] = random.randbytes(50)


WAYS: list[Callable[[Folder, Random], None]] = [
    *(spoil_field, spoil_field, drop_field, spoil_config, spoil_header, spoil_header, spoil_weights, spoil_numbers),
    *(add_index, link, leave_out),
]


def spoiled(path: Path, random: Random) -> Folder:
    """A folder with one to three things wrong; sometimes with none."""
    folder = Folder(path)
    for way in random.choices(WAYS, k=random.choice([0, 1, 1, 1, 2, 3])):
        way(folder, random)
    folder.write()
    return folder


# What both processes may grow by while most folders are refused: copies of those that were taken come and go.
MOST_GROWTH_MB = 200


def load(server: Server, folder: Folder, way: int) -> httpx.Response:
    client, name = server.acme.client, "acme-fuzz"
    if way == 0:
        return server.acme.put(name, folder.path.name)
    if way == 1:
        body = {"lora_name": name, "lora_path": folder.path.name, "load_inplace": True}
        return client.post("/v1/load_lora_adapter", json=body)
    return client.put(
        f"/v1/adapters/{name}",
        params={"config": folder.config[:4000].decode("utf-8", "replace")},
        content=folder.weights,
        headers={"content-type": "application/octet-stream"},
    )


@pytest.mark.parametrize(
    ("folders", "watched"),
    [
        (200, 0),
        pytest.param(10_000, 500, marks=[pytest.mark.long("it loads ten thousand folders"), pytest.mark.timeout(3600)]),
    ],
)
def test_no_folder_does_more_than_to_be_refused(tmp_path, folders, watched, record_property):
    """A neighbour streams beside the first folders; the others are quicker without."""
    statuses: Counter[int] = Counter()
    with serving(tmp_path) as server:
        pids = [server.program.pid, server.boss.client.get("/server_info").json()["replicas"][0]["pid"]]

        def load_some(seeds: range) -> float:
            for seed in seeds:
                random = Random(seed)
                folder = spoiled(server.acme.root / "fuzz", random)
                answer = load(server, folder, random.randrange(3))
                statuses[answer.status_code] += 1
                assert answer.status_code < 500 or answer.status_code == 507, (seed, answer.text)
                assert "Traceback" not in answer.text, seed
            return sum(map(memory_mb, pids))

        if watched:
            with neighbour(server) as gaps:
                load_some(range(watched))
            record_property("gaps", str(gaps))
            assert not gaps.problems
        half, whole = load_some(range(watched, folders // 2)), load_some(range(folders // 2, folders))
        record_property("statuses", f"{statuses}, {half:.0f} MB in the middle, {whole:.0f} MB at the end")
        assert statuses[200] > folders / 50, f"good folders are among them: {statuses}"
        assert statuses[400] > folders / 4, statuses
        assert server.boss.client.get("/server_info").json()["replicas"][0]["pid"] == pids[1], "no engine died"
        assert whole - half < MOST_GROWTH_MB, (half, whole)
        assert "Traceback" not in server.log.read_text()
        assert server.birds.ask("pirate").status_code == 200
