"""The bill of materials lists what an installation of the wheel runs, with versions, in CycloneDX's format."""

from __future__ import annotations

from importlib import metadata

from cyclonedx.factory.license import LicenseFactory
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def bill_of(package: str) -> str:
    """Of the package and all that it needs, at the versions that are installed here."""
    bill = Bom()
    made: dict[str, Component] = {}

    def component(name: str) -> Component:
        name = canonicalize_name(name)
        if name not in made:
            kind = ComponentType.LIBRARY if made else ComponentType.APPLICATION  # the first is the package itself
            made[name] = _component(name, kind)
            needed = [component(needs) for needs in _needs(name)]
            bill.register_dependency(made[name], needed)
            if kind is ComponentType.LIBRARY:
                bill.components.add(made[name])
        return made[name]

    bill.metadata.component = component(package)
    return JsonV1Dot6(bill).output_as_string(indent=2)


def _needs(name: str) -> list[str]:
    """Without extras: those are the user's choice."""
    needs = (Requirement(need) for need in metadata.requires(name) or ())
    return [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]


def _component(name: str, kind: ComponentType) -> Component:
    about = metadata.metadata(name)
    version = about["Version"]
    terms = [LicenseFactory().make_from_string(about["License-Expression"])] if "License-Expression" in about else []
    link = PackageURL("pypi", name=name, version=version)
    return Component(name=name, version=version, type=kind, licenses=terms, purl=link, bom_ref=str(link))
