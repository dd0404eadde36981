"""`make release` writes a release of the present version into a folder."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from release.changelog import section
from release.sbom import bill_of
from rota.core.version import DISTRIBUTION, __version__

ROOT = Path(__file__).parent.parent


def main(folder: Path) -> None:
    notes = section((ROOT / "CHANGELOG.md").read_text("utf-8"), __version__)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", folder.absolute()], cwd=ROOT, check=True)
    (folder / "CHANGES.md").write_text(notes, "utf-8")
    (folder / "sbom.cdx.json").write_text(bill_of(DISTRIBUTION), "utf-8")
    shutil.copy(ROOT / "constraints.txt", folder)
    digests = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(folder.iterdir())]
    (folder / "SHA256SUMS").write_text("".join(digests), "utf-8")
    print(f"Release {__version__} is in {folder}.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
