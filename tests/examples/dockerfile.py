"""A Dockerfile is acted without an engine: its steps make folders, and bubblewrap stands in for a container.

What differs from an engine: in place of the base image are this machine's /usr, without its compilers, and the Python
that runs this. `pip` has this machine's settings and network.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.processes import Command, Done, Program, run_program, started

# Variables of Docker's own image of Python.
_BASE_ENV = {"PATH": "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"}
# Programs that this machine may have and the base image has not, and those that a step of the Dockerfile installs.
_ABSENT = ("file", "git", "make", "curl")
_COMPILERS = ("*gcc*", "*g++*", "cc", "c++", "c89*", "c99*", "clang*", "tcc", "ld", "ld.*", "as")
# Where lists and plain words of an instruction go.
_FIELDS = {
    "ENTRYPOINT": "entrypoint",
    "CMD": "command",
    "VOLUME": "volumes",
    "USER": "user",
    "WORKDIR": "folder",
    "STOPSIGNAL": "stop_signal",
}
Step = tuple[str, str, dict[str, str]]


@dataclass
class Image:
    """A stage of a Dockerfile: the steps that make its files, and what it says of its containers."""

    base: Image | None
    name: str
    # COPY or RUN, what follows it, and the variables that it knows.
    steps: list[Step] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=lambda: dict(_BASE_ENV))
    arguments: dict[str, str] = field(default_factory=dict)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)
    volumes: list[str] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    user: str = "0:0"
    folder: str = "/"
    stop_signal: str = "SIGTERM"

    def note(self, word: str, rest: str, given: dict[str, str]) -> None:
        """Take an instruction in; one that is not known here raises KeyError."""
        known = self.env | self.arguments
        if word == "ARG":
            name, _, default = shlex.split(rest)[0].partition("=")
            self.arguments[name] = given.get(name, default)
        elif word == "ENV":
            self.env |= dict(pair.split("=", 1) for pair in shlex.split(_filled(rest, known)))
        elif word in ("RUN", "COPY"):
            self.steps.append((word, rest, known))
        elif word == "HEALTHCHECK":
            self.health = json.loads(rest.split(" CMD ", 1)[1])
        elif word == "EXPOSE":
            self.ports.append(int(rest))
        else:
            setattr(self, _FIELDS[word], json.loads(rest) if rest.startswith("[") else rest)


def images(text: str, **given: str) -> dict[str, Image]:
    """Every stage by its name, with these build arguments."""
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    found: dict[str, Image] = {}
    latest = of_all = Image(None, "")
    for line in filter(None, re.sub(r"\\\n\s*", "", lines).splitlines()):
        word, rest = line.split(None, 1)
        if word == "FROM":
            source, _, name = _filled(rest, of_all.arguments).split()
            base = found.get(source) or Image(None, source)
            latest = found[name] = copy.deepcopy(base)
            latest.base, latest.name, latest.steps, latest.arguments = base, name, [], {}
        else:
            latest.note(word, rest, given)
    return found


def _filled(text: str, known: dict[str, str]) -> str:
    return re.sub(r"\$\{?(\w+)\}?", lambda name: known[name[1]], text)


@dataclass
class Workshop:
    """Makes the files of images from a context, each in a folder of its own."""

    stages: dict[str, Image]
    context: Path
    home: Path
    # By the beginning of a RUN that cannot be done here: what is done to the files in its place.
    instead: dict[str, Callable[[Path], None]] = field(default_factory=dict)

    def files(self, name: str) -> Path:
        """The root folder of an image, which is made once."""
        made = self.home / name
        if made.exists():
            return made
        base = self.stages[name].base
        assert base is not None
        if base.name not in self.stages:
            _make_base(made)
        else:
            run_program(["cp", "--archive", "--link", self.files(base.name), made])
        absent: Sequence[str] = _ABSENT + _COMPILERS
        for word, rest, known in self.stages[name].steps:
            absent = _ABSENT if re.search("apt-get install .*gcc", rest) else absent
            if word == "COPY":
                self._copy(made, rest)
            else:
                self._run(made, rest, known, absent)
        (made / "tmp").mkdir(mode=0o1777, exist_ok=True)
        return made

    def _run(self, made: Path, line: str, known: dict[str, str], absent: Sequence[str]) -> None:
        if other := next((act for beginning, act in self.instead.items() if line.startswith(beginning)), None):
            return other(made)
        of_pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        env = known | of_pip | {"HOME": "/tmp", "PIP_NO_CACHE_DIR": "1"}
        shown = _sources()
        mounts = [word for path in shown for word in ("--ro-bind", path, path)]
        run_program([*_inside(made, "--bind", env, absent), "--tmpfs", "/tmp", *mounts, "sh", "-c", line])
        for place in (made / path[1:] for path in shown):  # where they were shown, something empty is left
            place.unlink(missing_ok=True) if place.is_file() else None
            for folder in (place, *place.parents):
                with suppress(OSError):
                    folder.rmdir()
        return None

    def _copy(self, made: Path, rest: str) -> None:
        """COPY of files into a folder, whose name ends in a slash, or of a folder under the same or another name."""
        *words, target = rest.split()
        origin = self.files(words.pop(0).removeprefix("--from=")) if words[0].startswith("--from=") else self.context
        for pattern in words:
            (source,) = origin.glob(pattern.lstrip("/"))
            place = made / target[1:] / source.name if target.endswith("/") else made / target[1:]
            place.parent.mkdir(parents=True, exist_ok=True)
            run_program(["cp", "--archive", "--no-target-directory", source, place])


def _sources() -> list[str]:
    """What a step must see of this machine so that pip finds its packages."""
    told = run_program([sys.executable, "-m", "pip", "config", "list"]).stdout
    folders = re.findall(r"(?:file://)?(/[^\s'\"]+)", told)
    paths = ["/etc/resolv.conf", "/etc/hosts", "/etc/ssl", "/etc/pip.conf", *folders]
    return [path for path in dict.fromkeys(paths) if Path(path).exists() and not path.startswith("/etc/ssl/")]


def _make_base(made: Path) -> None:
    """The stand-in for the base image has an /etc of its own, and a place for what is shown of this machine."""
    (made / "etc").mkdir(parents=True)
    (made / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (made / "etc/ld.so.conf").write_text("/usr/local/lib\n")
    run_program([*_inside(made, "--bind", _BASE_ENV), "--tmpfs", "/tmp", "ldconfig"])


def _inside(made: Path, bind: str, env: dict[str, str], absent: Sequence[str] = _ABSENT + _COMPILERS) -> list[str]:
    """What begins a command that runs in a root folder, in namespaces of its own but for the network."""
    words = ["bwrap", "--die-with-parent", "--unshare-ipc", "--unshare-pid", "--unshare-uts", bind, str(made), "/"]
    for folder in ("/usr", "/bin", "/sbin", "/lib", "/lib64"):
        if Path(folder).exists():
            words += ["--ro-bind", str(Path(folder).resolve()), folder]
    words += ["--ro-bind", sys.base_prefix, "/usr/local"]
    hidden = {path.resolve().name for pattern in absent for path in Path("/usr/bin").glob(pattern)}
    for path in (Path(folder) / name for folder in ("/usr/bin", "/bin") for name in sorted(hidden)):
        words += ["--ro-bind", "/dev/null", str(path)] if path.is_file() else []
    words += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--tmpfs", "/dev/shm", "--clearenv"]
    return words + [word for name, value in env.items() for word in ("--setenv", name, value)]


@dataclass
class Container:
    """What runs in an image's files: its first process, as it is known outside."""

    image: Image
    env: dict[str, str]
    program: Program
    pid: int

    def reach(self, *command: str | Path, **options: object) -> Done:
        """Run a program of this machine in the container's network, as what is in the same pod does."""
        return run_program(self.in_network(*command), check=False, **options)

    def in_network(self, *command: str | Path) -> Command:
        return ["nsenter", f"--target={self.pid}", "--net", *command]

    def execute(self, *command: str) -> Done:
        """Run a program of the container in it, as `docker exec` does."""
        pairs = [f"{name}={value}" for name, value in self.env.items()]
        enter = ["nsenter", f"--target={self.pid}", "--mount", "--net", "--ipc", "--pid"]
        return run_program(
            [*enter, "env", "--ignore-environment", *pairs, *as_user(self.image.user), *command], check=False
        )

    def writable(self) -> set[str]:
        """Where anything but devices and the kernel's own files can be written."""
        lines = [line.split() for line in Path(f"/proc/{self.pid}/mountinfo").read_text().splitlines()]
        return {
            fields[4]
            for fields in lines
            if "rw" in fields[5].split(",") and not fields[4].startswith(("/dev", "/proc"))
        }

    def stop(self) -> int:
        """The exit code after the signal that the image asks for."""
        os.kill(self.pid, signal.Signals[self.image.stop_signal])
        return self.program.wait()


def as_user(user: str) -> list[str]:
    """A command that begins so runs with this user's rights, and can gain no others."""
    uid, gid = user.split(":")
    dropped = ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
    return ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", *dropped]


@contextmanager
def running(
    image: Image,
    files: Path,
    arguments: list[str],
    mounts: dict[str, tuple[Path, bool]],
    env: dict[str, str] | None = None,
) -> Iterator[Container]:
    """A container with a read-only root and no network; `mounts` says what lies where, and if it is writable."""
    env = image.env | (env or {})
    words = [*_inside(files, "--ro-bind", env), "--unshare-net", "--as-pid-1", "--chdir", image.folder]
    for path, (source, is_writable) in mounts.items():
        (files / path[1:]).mkdir(parents=True, exist_ok=True)  # an engine makes the places of mounts, too
        words += ["--bind" if is_writable else "--ro-bind", str(source), path]
    told, tell = os.pipe()
    command = [*words, "--info-fd", str(tell), *as_user(image.user), *image.entrypoint, *(arguments or image.command)]
    with started(command, pass_fds=[tell]) as program:
        os.close(tell)
        with open(told) as info:
            pid = json.load(info)["child-pid"]
        yield Container(image, env, program, pid)
