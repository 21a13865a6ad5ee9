"""Who may call: files from Secrets and ConfigMaps."""

from __future__ import annotations

import helm_python
import pytest

from tests.helm.chart import deployment, render, rendered, services

CONTAINERS_WITH_KEYS = {"tokenizer", "engine"}
SECRETS = {"saltSecret": {"name": "mine"}, "digestKey": {"name": "mine"}}


def test_without_auth_nobody_is_asked() -> None:
    for each in services(render({})):
        assert each.flags.isdisjoint({"api-keys", "jwt-issuer", "tenants", "salt-secret-file", "digest-key-file"})


@pytest.mark.parametrize("missing", ["saltSecret", "digestKey"])
def test_tenants_without_their_secrets_are_refused(missing: str) -> None:
    secrets = {name: reference for name, reference in SECRETS.items() if name != missing}
    with pytest.raises(helm_python.HelmError, match=rf"auth\.{missing}\.name: tenants need it"):
        render({"auth": {"tenants": {"name": "t"}, **secrets}})


def test_each_container_gets_the_secrets_it_needs_and_no_others() -> None:
    for each in services(rendered("tenants")):
        folders = {mount["mountPath"] for mount in each.spec["volumeMounts"]}
        assert ("/etc/kvern/digest-key" in folders) == (each.name in CONTAINERS_WITH_KEYS)
        for folder in ("api-keys", "tenants", "salt"):
            assert (f"/etc/kvern/{folder}" in folders) == (each.name == "router")


def test_tenants_may_come_from_a_secret() -> None:
    documents = render({"auth": {**SECRETS, "tenants": {"kind": "secret", "name": "t", "key": "file"}}})
    pod = deployment(documents, "router")["spec"]["template"]["spec"]
    [volume] = [each for each in pod["volumes"] if each["name"] == "tenants"]
    assert volume["secret"] == {"secretName": "t", "items": [{"key": "file", "path": "tenants.yaml"}]}
