"""`examples/kubeflow.yaml` beside the definitions that Kubeflow Trainer publishes, every field of it.

In: these definitions, where `scripts/kubeflow` has fetched them once. Rules in the language of expressions are not run.
"""

import copy
import re
import subprocess
import unittest
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float)}


def check(schema: dict[str, Any], value: Any, at: str) -> None:
    """Refuses what an API server with strict validation refuses: fields that nobody knows, too."""

    def refuse(why: str) -> None:
        raise ValueError(f"{at} {why}")

    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            refuse(f"is {value!r}, no number and no text")
        return
    wanted = TYPES[schema["type"]]
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        refuse(f"is {value!r}, no {schema['type']}")
    if "enum" in schema and value not in schema["enum"]:
        refuse(f"is {value!r}, none of {schema['enum']}")
    if isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
        refuse(f"is {value!r}, not as {schema['pattern']}")
    if isinstance(value, int) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        refuse(f"is {value}, out of bounds")
    if isinstance(value, list):
        for number, it in enumerate(value):
            check(schema["items"], it, f"{at}[{number}]")
    if isinstance(value, dict):
        if missing := set(schema.get("required", ())) - set(value):
            refuse(f"lacks {sorted(missing)}")
        fields, others = schema.get("properties", {}), schema.get("additionalProperties")
        for name, it in value.items():
            if name in fields or isinstance(others, dict):
                check(fields.get(name, others), it, f"{at}.{name}")
            elif at != "metadata" and not schema.get("x-kubernetes-preserve-unknown-fields"):
                refuse(f"has no field {name}")


class Example(unittest.TestCase):
    def setUp(self) -> None:
        found = subprocess.run([ROOT / "scripts/kubeflow", "--fetched"], capture_output=True, text=True, check=False)
        if found.returncode:
            self.skipTest(f"the definitions are not there: {found.stderr.strip()}")
        self.schemas = {}
        for file in Path(found.stdout.strip()).glob("trainer.kubeflow.org_*.yaml"):
            spec = yaml.safe_load(file.read_text())["spec"]
            for version in spec["versions"]:
                name = f"{spec['group']}/{version['name']} {spec['names']['kind']}"
                self.schemas[name] = version["schema"]["openAPIV3Schema"]
        text = (ROOT / "examples/kubeflow.yaml").read_text()
        self.runtime, self.job = list(yaml.safe_load_all(text))

    def check(self, it: dict[str, Any]) -> None:
        schema = self.schemas[f"{it['apiVersion']} {it['kind']}"]
        for name, value in it.items():
            if name == "metadata":
                self.assertEqual(set(value) - {"name", "labels"}, set())
            else:
                check(schema["properties"][name], value, name)

    def test_kubeflows_definitions_know_every_field(self) -> None:
        for it in (self.runtime, self.job):
            self.check(it)
        self.assertEqual(self.job["spec"]["runtimeRef"]["name"], self.runtime["metadata"]["name"])

        def container(runtime: dict[str, Any]) -> dict[str, Any]:
            job = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]
            return job["spec"]["template"]["spec"]["containers"][0]

        for change, words in (
            (lambda it: it["spec"].update(mlPolicies={}), "has no field mlPolicies"),
            (lambda it: it["spec"]["mlPolicy"].update(numNodes="two"), "mlPolicy.numNodes is 'two', no integer"),
            (lambda it: container(it)["env"][0].pop("name"), r"env\[0\] lacks \['name'\]"),
            (lambda it: container(it).update(orders=[]), r"containers\[0\] has no field orders"),
        ):
            wrong = copy.deepcopy(self.runtime)
            change(wrong)
            with self.assertRaisesRegex(ValueError, words):
                self.check(wrong)
        # What a pod of another kind needs of Cadre's: every variable is of the contract.
        names = {it["name"] for it in container(self.runtime)["env"]}
        contract = (ROOT / "crds/src/contract.rs").read_text()
        self.assertEqual(names - set(re.findall(r'"(CADRE_\w+)"', contract)), set())
        needed = {"ROLE", "CONTROL", "CONTROL_CA", "CONTROL_TOKEN", "CHECKPOINTS", "HOST"}
        self.assertEqual(names, {f"CADRE_{it}" for it in needed})


if __name__ == "__main__":
    unittest.main()
