"""`kvern keys`: keys for the file that routers are given as --api-keys."""

from __future__ import annotations

import hashlib
import re
import secrets

import click

_KEY_PREFIX = "kvern_"
"""So that scanners find keys where they do not belong."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/+-]{0,127}")


def _name(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    if not _NAME.fullmatch(value):
        raise click.BadParameter("letters, digits and . _ : @ / + - only, 128 at most")
    return value


@click.group()
def keys() -> None:
    """Make API keys."""


@keys.command()
@click.argument("id", callback=_name)
@click.option("--tenant", required=True, callback=_name, help="Whose key it is.")
@click.option("--role", "roles", type=click.Choice(["user", "admin"]), multiple=True, default=["user"])
@click.option("--expires", type=click.DateTime(["%Y-%m-%d"]), help="Day in UTC on which it stops to work.")
def new(id: str, tenant: str, roles: tuple[str, ...], expires: object) -> None:
    """Print a new key, which is shown this once, on stderr, and its entry for the file of keys on stdout."""
    # 256 random bits: nobody guesses them, so a plain hash of them is safe to keep.
    key = _KEY_PREFIX + secrets.token_urlsafe(32)
    click.echo(f"the key, which is kept nowhere: {key}", err=True)
    click.echo(f"  - id: {id}")
    click.echo(f"    sha256: {hashlib.sha256(key.encode()).hexdigest()}")
    click.echo(f"    tenant: {tenant}")
    click.echo(f"    roles: [{', '.join(roles)}]")
    if expires is not None:
        click.echo(f"    expires_at: {expires:%Y-%m-%d}T00:00:00Z")
