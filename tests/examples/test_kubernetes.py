"""The manifests fit the schemas of their kinds, one another, their values and the image; no cluster is asked."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from docs.generate.pages import DOCS
from examples.kubernetes.manifests import VALUES, manifests
from rota.commands.serve import SERVE_CONFIGS
from rota.core.options import options_of
from rota.core.version import __version__
from tests.examples.dockerfile import images

FOLDER = DOCS.parent / "examples/kubernetes"
MANIFESTS = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in sorted(FOLDER.glob("*.yaml"))}
BUILT_IN = ("deployment", "service", "network-policy")
# Fields of custom resources as their references give them: a type, a table of fields, or a list of one table.
# A field that ends in ! must be there.
LABELS = {"matchLabels": dict}
CUSTOM: dict[tuple[str, str], dict[str, Any]] = {
    ("inference.networking.k8s.io/v1", "InferencePool"): {
        "selector!": LABELS,
        "targetPorts!": [{"number!": int}],
        "appProtocol": str,
        "endpointPickerRef!": {
            "name!": str,
            "group": str,
            "kind": str,
            "port": {"number!": int},
            "failureMode": str,
        },
    },
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): {
        "parentRefs": [{"name!": str, "namespace": str, "kind": str, "group": str, "sectionName": str, "port": int}],
        "hostnames": list,
        "rules": [
            {
                "name": str,
                "matches": [{"path": {"type": str, "value": str}, "headers": list, "method": str}],
                "filters": list,
                "backendRefs": [{"name!": str, "group": str, "kind": str, "port": int, "weight": int}],
                "timeouts": {"request": str, "backendRequest": str},
            }
        ],
    },
    ("monitoring.coreos.com/v1", "ServiceMonitor"): {
        "selector!": LABELS,
        "endpoints!": [{"port": str, "path": str, "interval": str, "scheme": str}],
        "namespaceSelector": dict,
    },
}


def faults(given: Any, expected: Any, place: str = "spec") -> list[str]:
    """What in a manifest does not fit the table."""
    if isinstance(expected, type):
        return [] if isinstance(given, expected) else [f"{place} is not {expected.__name__}"]
    if isinstance(expected, list):
        if not isinstance(given, list) or not given:
            return [f"{place} is no list"]
        return [fault for one in given for fault in faults(one, expected[0], place)]
    known = {name.rstrip("!"): fields for name, fields in expected.items()}
    missing = [f"{place}.{name[:-1]} is missing" for name in expected if name.endswith("!") and name[:-1] not in given]
    unknown = [f"{place}.{name} is not known" for name in given if name not in known]
    inner = [fault for name in given if name in known for fault in faults(given[name], known[name], f"{place}.{name}")]
    return missing + unknown + inner


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_manifest_of_a_built_in_kind_fits_the_schema_of_kubernetes(name):
    kubernetes_validate.validate(MANIFESTS[name], "1.34", strict=True)


def test_a_field_that_is_not_there_would_be_found():
    wrong = MANIFESTS["service"] | {"spec": {**MANIFESTS["service"]["spec"], "prots": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.34", strict=True)
    pool = CUSTOM["inference.networking.k8s.io/v1", "InferencePool"]
    assert faults({"selector": {"app": "rota"}, "targetPorts": [{"number": "80"}]}, pool) == [
        "spec.endpointPickerRef is missing",
        "spec.selector.app is not known",
        "spec.targetPorts.number is not int",
    ]


@pytest.mark.parametrize("name", [name for name in MANIFESTS if name not in BUILT_IN])
def test_a_custom_resource_has_the_fields_of_its_reference(name):
    manifest = MANIFESTS[name]

    assert manifest["metadata"]["name"] == "rota"
    assert faults(manifest["spec"], CUSTOM[manifest["apiVersion"], manifest["kind"]]) == []


def test_the_manifests_are_what_the_values_and_the_version_make():
    written = {path.name: path.read_text("utf-8") for path in FOLDER.glob("*.yaml")}

    assert written == manifests(), "the manifests are not current: `make docs` writes them anew"
    assert container()["image"].endswith(f":{__version__}")


@pytest.mark.parametrize("name", tomllib.loads(VALUES.read_text("utf-8")))
def test_a_value_shows_in_the_manifests(tmp_path, name):
    """A name that no template reads would be a promise."""
    lines = VALUES.read_text("utf-8").splitlines()
    (old,) = [line for line in lines if line.startswith(f"{name} = ")]
    new = f'{name} = "other"' if old.endswith('"') else f"{name} = 77"
    values = tmp_path / "values.toml"
    values.write_text("\n".join(new if line == old else line for line in lines))

    assert manifests(values) != manifests()


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_pod_has_the_user_the_variables_and_the_volume_of_its_image(target):
    image = images((DOCS.parent / "Dockerfile").read_text("utf-8"))[target]
    pod = MANIFESTS["deployment"]["spec"]["template"]["spec"]
    user = pod["securityContext"]
    written = {name: value for name, value in image.env.items() if value.startswith("/scratch")}
    writable = [mount["mountPath"] for mount in container()["volumeMounts"] if not mount.get("readOnly")]

    assert f"{user['runAsUser']}:{user['runAsGroup']}" == f"{user['runAsUser']}:{user['fsGroup']}" == image.user
    assert {variable["name"]: variable["value"] for variable in container()["env"]} == written
    assert writable == image.volumes
    assert container()["securityContext"]["readOnlyRootFilesystem"]


def test_what_a_pod_is_told_to_read_lies_in_one_of_its_volumes():
    mounts = [Path(mount["mountPath"]) for mount in container()["volumeMounts"]]
    words = (argument.rpartition("=")[2] for argument in container()["args"])
    paths = [Path(word) for word in words if word.startswith("/")]

    assert len(paths) == 3
    assert [path for path in paths if not any(path.is_relative_to(mount) for mount in mounts)] == []


def test_the_flags_of_the_pods_are_flags_of_rota_serve():
    command, model, *flags = container()["args"]
    options = {f"--{name.replace('_', '-')}" for name in options_of(*SERVE_CONFIGS)}

    assert (command, model.startswith("/models")) == ("serve", True)
    assert [flag for flag in flags if flag.partition("=")[0] not in options] == []


def test_ports_and_labels_agree_from_the_gateway_to_the_pods():
    flags = dict(flag.split("=") for flag in container()["args"][2:])
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    pool = MANIFESTS["inference-pool"]["spec"]
    labels = MANIFESTS["deployment"]["spec"]["template"]["metadata"]["labels"]

    assert ports == {"http": int(flags["--port"]), "metrics": int(flags["--metrics-port"])}
    assert pool["targetPorts"] == [{"number": ports["http"]}]
    assert {port["targetPort"] for port in MANIFESTS["service"]["spec"]["ports"]} == set(ports)
    assert MANIFESTS["service-monitor"]["spec"]["endpoints"][0]["port"] == "metrics"
    for selector in (
        MANIFESTS["service"]["spec"]["selector"],
        pool["selector"]["matchLabels"],
        MANIFESTS["network-policy"]["spec"]["podSelector"]["matchLabels"],
        MANIFESTS["service-monitor"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    [backend] = MANIFESTS["http-route"]["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", MANIFESTS["inference-pool"]["metadata"]["name"])


def test_a_pod_has_longer_to_end_than_its_open_answers():
    pod = MANIFESTS["deployment"]["spec"]["template"]["spec"]
    flags = dict(flag.split("=") for flag in container()["args"][2:])
    pause_s = container()["lifecycle"]["preStop"]["sleep"]["seconds"]

    assert pod["terminationGracePeriodSeconds"] > pause_s + float(flags["--drain-timeout"])


def container() -> dict[str, Any]:
    [one] = MANIFESTS["deployment"]["spec"]["template"]["spec"]["containers"]
    return one
