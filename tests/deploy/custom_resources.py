"""Schemas of two custom resources, restricted to the fields that the manifests use.

Validation is strict: other fields are refused. Sources: https://prometheus-operator.dev/docs/api-reference/api/
(monitoring.coreos.com/v1) and https://cert-manager.io/docs/reference/api-docs/ (cert-manager.io/v1). Kubernetes' own
schemas come with kubernetes-validate.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Duration = Annotated[str, Field(pattern=r"^(\d+(ms|s|m|h|d|w|y))+$")]
GoDuration = Annotated[str, Field(pattern=r"^(\d+(\.\d+)?(ns|us|ms|s|m|h))+$")]
Label = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Metadata(Strict):
    name: Label
    labels: dict[str, str] = {}


class Selector(Strict):
    matchLabels: dict[str, str]


class Endpoint(Strict):
    port: str
    path: str = "/metrics"
    interval: Duration
    honorLabels: bool = False


class Endpoints(Strict):
    selector: Selector
    endpoints: list[Endpoint] = Field(min_length=1)


class ServiceMonitor(Strict):
    apiVersion: Literal["monitoring.coreos.com/v1"]
    kind: Literal["ServiceMonitor"]
    metadata: Metadata
    spec: Endpoints


class Rule(Strict):
    alert: str
    expr: str
    for_: Duration | None = Field(None, alias="for")
    labels: dict[str, str]
    annotations: dict[str, str]


class RecordingRule(Strict):
    record: str
    expr: str


class RuleGroup(Strict):
    name: str
    rules: list[Rule | RecordingRule]


class RuleGroups(Strict):
    groups: list[RuleGroup]


class PrometheusRule(Strict):
    apiVersion: Literal["monitoring.coreos.com/v1"]
    kind: Literal["PrometheusRule"]
    metadata: Metadata
    spec: RuleGroups


class SecretName(Strict):
    secretName: Label


class IssuerKind(Strict):
    ca: SecretName | None = None
    selfSigned: dict[str, Any] | None = None


class Issuer(Strict):
    apiVersion: Literal["cert-manager.io/v1"]
    kind: Literal["Issuer"]
    metadata: Metadata
    spec: IssuerKind


class PrivateKey(Strict):
    algorithm: Literal["RSA", "ECDSA", "Ed25519"]
    size: Literal[256, 384, 521, 2048, 4096, 8192]
    rotationPolicy: Literal["Never", "Always"] | None = None


class IssuerRef(Strict):
    name: Label
    kind: Literal["Issuer", "ClusterIssuer"]


class CertificateSpec(Strict):
    secretName: Label
    issuerRef: IssuerRef
    commonName: Annotated[str, Field(max_length=64)] | None = None
    dnsNames: list[str] = []
    isCA: bool = False
    duration: GoDuration
    renewBefore: GoDuration | None = None
    usages: list[Literal["server auth", "client auth", "digital signature", "key encipherment"]] = []
    privateKey: PrivateKey


class Certificate(Strict):
    apiVersion: Literal["cert-manager.io/v1"]
    kind: Literal["Certificate"]
    metadata: Metadata
    spec: CertificateSpec


SCHEMAS: dict[str, type[Strict]] = {
    model.__name__: model for model in (ServiceMonitor, PrometheusRule, Issuer, Certificate)
}
