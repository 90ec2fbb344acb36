"""Bill of materials of the files in ``dist``, in CycloneDX 1.6: what they hold, and what they ask for."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import re
import uuid
import zipfile
from email.parser import BytesParser
from typing import TYPE_CHECKING, Any

from tools.projects import projects

if TYPE_CHECKING:
    from email.message import Message
    from pathlib import Path

__all__ = ["bill", "check_bill"]

COMPILED = {"nanobind": "BSD-3-Clause", "robin-map": "MIT"}
"""What is compiled into wheels with native code → its licence; nanobind brings robin-map in its own release."""
_NAME = re.compile(r"^([A-Za-z0-9][\w.-]*)\s*(?:\[([\w, -]*)\])?\s*([^;]*)(?:;\s*(.*))?$")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (item for item in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", item))
        return BytesParser().parsebytes(archive.read(name))


def _files(folder: Path, module: str, version: str) -> list[dict[str, Any]]:
    """Return a reference with its hash for each file of a distribution."""
    found = sorted([*folder.glob(f"{module}-{version}.tar.gz"), *folder.glob(f"{module}-{version}-*.whl")])
    return [
        {
            "type": "distribution",
            "url": file.name,
            "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(file.read_bytes()).hexdigest()}],
        }
        for file in found
    ]


def bill(folder: Path) -> dict[str, Any]:
    """Describe every distribution whose wheel is in a folder, what is compiled into it, and what it requires.

    The same files give the same document: it has no time, and its serial number is made of their hashes.
    """
    ours: dict[str, dict[str, Any]] = {}
    others: dict[str, set[str]] = {}
    needed: dict[str, set[str]] = {}
    optional: set[str] = set()
    for project in projects():
        wheels = sorted(folder.glob(f"{project.module}-{project.version}-*.whl"))
        if not wheels:
            continue
        metadata = _metadata(wheels[0])
        needed[project.name] = set()
        reference = f"pkg:pypi/{project.name}@{project.version}"
        ours[project.name] = {
            "type": "library",
            "bom-ref": reference,
            "name": project.name,
            "version": project.version,
            "description": metadata["Summary"],
            "licenses": [{"expression": metadata["License-Expression"]}],
            "purl": reference,
            "externalReferences": _files(folder, project.module, project.version),
        }
        if project.native:
            ours[project.name]["components"] = [_compiled(name, project.name) for name in COMPILED]
        for line in metadata.get_all("Requires-Dist") or []:
            name, _, bound, marker = _split(line)
            if "extra ==" in marker:
                optional.add(name)
            else:
                needed[project.name].add(name)
            others.setdefault(name, set()).add(bound)
    third = {name: bounds for name, bounds in others.items() if name not in ours}
    always = set().union(*needed.values()) if needed else set()
    components = [*ours.values(), *(_third(name, third[name], required=name in always) for name in sorted(third))]
    references = {item["name"]: item["bom-ref"] for item in components}
    content = json.dumps(components, sort_keys=True)
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, content)}",
        "version": 1,
        "metadata": {
            "component": {"type": "library", "bom-ref": "q4core-release", "name": "q4core and its plugins"},
            "licenses": [{"expression": "Apache-2.0"}],
        },
        "components": components,
        "dependencies": [
            {"ref": "q4core-release", "dependsOn": [references[name] for name in ours]},
            *(
                {"ref": references[name], "dependsOn": sorted(references[item] for item in needed.get(name, ()))}
                for name in ours
            ),
        ],
    }


def _split(line: str) -> tuple[str, str, str, str]:
    """Return the name, extras, version bounds and marker of a requirement."""
    found = _NAME.match(line.strip())
    if found is None:
        raise ValueError(f"a requirement must have the form of PEP 508, got {line!r}")
    name, extras, bound, marker = found.groups(default="")
    return _normal(name), extras, bound.strip(), marker


def _compiled(name: str, into: str) -> dict[str, Any]:
    described: dict[str, Any] = {
        "type": "library",
        "bom-ref": f"{name} in {into}",
        "name": name,
        "licenses": [{"license": {"id": COMPILED[name]}}],
    }
    if name == "nanobind":
        described["version"] = importlib.metadata.version(name)
        described["purl"] = f"pkg:pypi/{name}@{described['version']}"
    return described


def _third(name: str, bounds: set[str], *, required: bool) -> dict[str, Any]:
    described = {
        "type": "library",
        "bom-ref": f"pkg:pypi/{name}",
        "name": name,
        "purl": f"pkg:pypi/{name}",
        "scope": "required" if required else "optional",
    }
    asked = sorted(bounds - {""})
    return described | ({"properties": [{"name": "q4core:requires", "value": "; ".join(asked)}]} if asked else {})


def check_bill(document: dict[str, Any]) -> None:
    """Compare a bill with the schema of CycloneDX.

    Raises:
        ValueError: It does not follow the schema; the message says where.
    """
    schema = importlib.import_module("cyclonedx.schema")
    validator = importlib.import_module("cyclonedx.validation.json").JsonStrictValidator(schema.SchemaVersion.V1_6)
    problem = validator.validate_str(json.dumps(document))
    if problem is not None:
        raise ValueError(f"the bill of materials does not follow CycloneDX 1.6: {problem}")
