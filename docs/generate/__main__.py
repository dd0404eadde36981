"""Writes every generated page, and the manifests for Kubernetes: `python -m docs.generate`."""

from __future__ import annotations

from docs.generate.figures import SHOWN_IN, with_figures
from docs.generate.pages import DOCS, PAGES, page
from examples.kubernetes import manifests

for name in PAGES:
    (DOCS / name).write_text(page(name), "utf-8")
    print(f"docs/{name}")
for path in SHOWN_IN:
    path.write_text(with_figures(path.read_text("utf-8")), "utf-8")
    print(path.relative_to(DOCS.parent))

manifests.write()
print("examples/kubernetes")
