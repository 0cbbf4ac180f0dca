#!/usr/bin/env python3
"""Compares the rendered Helm chart with the manifests in deploy/kubernetes.

    chart.py HELM

With default values, both must define the same objects. Every option is rendered, too, and the result is validated
against the Kubernetes schemas. Called by ./dev chart.
"""

import difflib
import json
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import yaml

CHART = "deploy/helm"
# Labels that only Helm adds.
HELM_LABELS = {
    "app.kubernetes.io/instance",
    "app.kubernetes.io/managed-by",
    "app.kubernetes.io/version",
    "helm.sh/chart",
}
CUSTOM_KINDS = {"ServiceMonitor", "PrometheusRule"}
KUBERNETES = ("1.28", "1.37")


def fail(reason):
    sys.exit(f"chart.py: {reason}")


class Helm:
    def __init__(self, program):
        self.program = program

    def run(self, *words):
        done = subprocess.run([self.program, *words], capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    def render(self, *values, release="walpost"):
        """Returns the rendered objects by kind and name."""
        words = [word for value in values for word in ("--set", value)]
        code, output, error = self.run("template", release, CHART, "--kube-version", KUBERNETES[0], *words)
        if code:
            fail(f"helm template with {values}: {error}")
        return by_name(yaml.safe_load_all(output))


def by_name(documents):
    objects = {}
    for document in documents:
        if document is None:
            continue
        key = (document["kind"], document["metadata"]["name"])
        if key in objects:
            fail(f"{key} is rendered twice")
        objects[key] = document
    return objects


def normal(value):
    """Returns the value without the labels and annotations that only Helm adds, with the files of a volume sorted."""
    if isinstance(value, list):
        return [normal(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {key: normal(item) for key, item in value.items() if key not in HELM_LABELS}
    if "secretName" in kept:
        kept["items"].sort(key=lambda item: item["path"])
    if isinstance(kept.get("annotations"), dict):
        kept["annotations"].pop("checksum/config", None)
        if not kept["annotations"]:
            del kept["annotations"]
    return kept


def compare(expected, found, what):
    if expected == found:
        return
    texts = (yaml.safe_dump(value, sort_keys=True).splitlines() for value in (expected, found))
    fail(f"{what}:\n" + "\n".join(difflib.unified_diff(*texts, "expected", "found", lineterm="")))


def validate(objects):
    for (kind, name), document in objects.items():
        if kind in CUSTOM_KINDS:
            continue
        for version in KUBERNETES:
            try:
                kubernetes_validate.validate(document, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                fail(f"{kind} {name} in Kubernetes {version}: {error}")


def plain_manifests():
    paths = sorted(Path("deploy/kubernetes").glob("*.yaml"))
    return by_name(document for path in paths for document in yaml.safe_load_all(path.read_text()))


def check_defaults(helm):
    rendered = helm.render()
    validate(rendered)
    compare(normal(plain_manifests()), normal(rendered), "the chart's defaults and deploy/kubernetes")


def check_selectors(helm):
    """Checks that two releases in one namespace do not select each other's pods."""
    for release in ("walpost", "orders"):
        rendered = helm.render("serviceMonitor.enabled=true", release=release)
        name = "walpost" if release == "walpost" else "orders-walpost"
        if {found for _, found in rendered} != {name, f"{name}-metrics"}:
            fail(f"release {release}: found the names {sorted(rendered)}")
        selector = {"app.kubernetes.io/name": "walpost", "app.kubernetes.io/instance": release}
        deployment = rendered["Deployment", name]["spec"]
        spread = deployment["template"]["spec"]["topologySpreadConstraints"][0]
        service = rendered["Service", f"{name}-metrics"]
        for what, found in (
            ("Deployment", deployment["selector"]["matchLabels"]),
            ("topology spread", spread["labelSelector"]["matchLabels"]),
            ("Service", service["spec"]["selector"]),
            ("PodDisruptionBudget", rendered["PodDisruptionBudget", name]["spec"]["selector"]["matchLabels"]),
            ("NetworkPolicy", rendered["NetworkPolicy", name]["spec"]["podSelector"]["matchLabels"]),
            ("ServiceMonitor", rendered["ServiceMonitor", name]["spec"]["selector"]["matchLabels"]),
        ):
            compare(selector, found, f"{what} of release {release}")
        for what, labels in (
            ("pod", deployment["template"]["metadata"]["labels"]),
            ("Service", service["metadata"]["labels"]),
        ):
            if not selector.items() <= labels.items():
                fail(f"the {what} of release {release} has the labels {labels}, expected {selector}")


def check_options(helm):
    rendered = helm.render(
        "serviceMonitor.enabled=true",
        "serviceMonitor.labels.release=prometheus",
        "alerts.enabled=true",
        "alerts.labels.release=prometheus",
        "dashboard.enabled=true",
        "secret.name=shop",
        "image.digest=sha256:" + "0" * 64,
        "extraEnv[0].name=RUST_LOG",
        "extraEnv[0].value=debug",
        "nodeSelector.disk=ssd",
    )
    validate(rendered)
    alerts = yaml.safe_load(Path("deploy/prometheus/alerts.yml").read_text())
    rule = rendered["PrometheusRule", "walpost"]
    compare(alerts, rule["spec"], "the PrometheusRule and deploy/prometheus/alerts.yml")
    linked = helm.render("alerts.enabled=true", "alerts.documentation=https://wiki.example.com/walpost/")
    rules = linked["PrometheusRule", "walpost"]["spec"]["groups"][0]["rules"]
    start = "https://wiki.example.com/walpost/docs/operations.md#"
    compare([], [rule for rule in rules if not rule["annotations"]["runbook_url"].startswith(start)], "the links to the runbook")
    dashboard = json.loads(Path("deploy/grafana/dashboard.json").read_text())
    config = rendered["ConfigMap", "walpost-dashboard"]
    compare(dashboard, json.loads(config["data"]["walpost.json"]), "the dashboard")
    monitor = rendered["ServiceMonitor", "walpost"]
    for document in (rule, monitor):
        compare("prometheus", document["metadata"]["labels"]["release"], "the label that Prometheus selects")
    # The alerts select job="walpost".
    service = rendered["Service", "walpost-metrics"]
    compare("walpost", service["metadata"]["labels"][monitor["spec"]["jobLabel"]], "the name of the job")
    ports = [port["name"] for port in service["spec"]["ports"]]
    compare(ports, [endpoint["port"] for endpoint in monitor["spec"]["endpoints"]], "the ports that are scraped")
    pod = rendered["Deployment", "walpost"]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    variables = container["env"]
    secrets = {variable["valueFrom"]["secretKeyRef"]["name"] for variable in variables if "valueFrom" in variable}
    secrets |= {volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
    compare({"shop"}, secrets, "the Secret that is referenced")
    compare({"name": "RUST_LOG", "value": "debug"}, variables[-1], "a further variable")
    compare({"disk": "ssd"}, pod["nodeSelector"], "the node selector")
    if not container["image"].endswith("@sha256:" + "0" * 64):
        fail(f"the image is {container['image']}, expected its digest")


def check_single_replica(helm):
    rendered = helm.render("replicas=1", "networkPolicy.enabled=false", "serviceAccount.create=false")
    validate(rendered)
    compare(
        [("ConfigMap", "walpost"), ("Deployment", "walpost"), ("Service", "walpost-metrics")],
        sorted(rendered),
        "the objects of a single instance",
    )


def check_mistakes(helm):
    """Checks that an invalid value is an error and is not replaced by a default."""
    for mistake in ("replicas=0", "replica=2", "alerts.enable=true", "terminationGracePeriodSeconds=30", "image.digest=1"):
        code, _, error = helm.run("template", "walpost", CHART, "--kube-version", KUBERNETES[0], "--set", mistake)
        if code == 0:
            fail(f"--set {mistake} is accepted")
        if mistake.split("=")[0].split(".")[-1] not in error:
            fail(f"--set {mistake}: the error does not name the value: {error}")


def check_lint(helm):
    code, output, error = helm.run("lint", "--strict", "--kube-version", KUBERNETES[0], CHART)
    if code:
        fail(f"helm lint: {output}{error}")


def check_version():
    chart = yaml.safe_load(Path(CHART, "Chart.yaml").read_text())
    line = next(line for line in Path("Cargo.toml").read_text().splitlines() if line.startswith("version = "))
    version = line.split('"')[1]
    compare((version, version), (chart["version"], chart["appVersion"]), "the versions in Cargo.toml and Chart.yaml")


def main():
    helm = Helm(sys.argv[1])
    check_version()
    check_lint(helm)
    check_defaults(helm)
    check_selectors(helm)
    check_options(helm)
    check_single_replica(helm)
    check_mistakes(helm)
    print("the chart renders deploy/kubernetes, and every option")


main()
