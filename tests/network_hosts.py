"""Hosts on one machine, as network namespaces on a bridge, each with a real sshd; and whether they can run here."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

NEEDED = {"sshd": "openssh-server", "ssh": "openssh-client", "pdsh": "pdsh", "ip": "iproute2", "tc": "iproute2"}
SBIN = "/usr/sbin:/sbin"
needs_pdsh = pytest.mark.skipif(not shutil.which("pdsh"), reason="not installed: pdsh")
"""For a test in which DeepSpeed's launcher is to start ranks on several hosts."""


@cache
def without_hosts() -> str:
    """Return why two hosts cannot run here; empty if they can."""
    missing = [
        package for tool, package in NEEDED.items() if not shutil.which(tool, path=f"{os.environ['PATH']}:{SBIN}")
    ]
    if os.getuid() != 0:
        return "network namespaces need root"
    if missing:
        return f"not installed: {', '.join(missing)}"
    name = f"dsp{os.getpid()}"
    for made in (("netns", "add", name), ("link", "add", name, "type", "bridge")):
        probe = subprocess.run(["ip", *made], capture_output=True, text=True)
        if probe.returncode:
            return f"ip {' '.join(made)}: {probe.stderr.strip()}"
        subprocess.run(["ip", made[0], "delete", name], check=True)
    return ""


@dataclass
class Hosts:
    """`count` hosts, `addresses`, that accept root's logins over ssh with a key in `folder`.

    ssh reads its configuration only from the account's home, where tests must not write; so a script named ssh, first
    on the PATH, adds `-F`.
    """

    folder: Path
    count: int = 2

    def __enter__(self) -> "Hosts":
        self.folder.mkdir(parents=True)
        self.tag = f"{os.getpid() % 100000:05d}"
        self.bridge, self.spaces = f"dsb{self.tag}", [f"ds{self.tag}{index}" for index in range(self.count)]
        self.network = f"10.{173 + os.getpid() % 50}.{os.getpid() % 251}"
        self.addresses = [f"{self.network}.{index + 1}" for index in range(self.count)]
        self.servers: list[subprocess.Popen] = []
        try:
            self._connect()
            self._keys()
            for index in range(self.count):
                self.serve(index)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.kill()  # unshare ignores other signals; its children die with it
            server.wait()
        for space in self.spaces:
            pids = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True).stdout.split()
            for pid in pids:
                os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", space], capture_output=True)
        subprocess.run(["ip", "link", "delete", self.bridge], capture_output=True)
        if self.made_run:
            shutil.rmtree("/run/sshd", ignore_errors=True)

    def _connect(self) -> None:
        ip("link", "add", self.bridge, "type", "bridge")
        ip("address", "add", f"{self.network}.254/24", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")
        for index, space in enumerate(self.spaces):
            ip("netns", "add", space)
            ip("link", "add", f"{self.bridge}{index}", "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", f"{self.bridge}{index}", "master", self.bridge, "up")
            ip("-n", space, "address", "add", f"{self.addresses[index]}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")

    def _keys(self) -> None:
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name], check=True)
        config = [
            f"IdentityFile {self.folder / 'user'}",
            f"UserKnownHostsFile {self.folder / 'known'}",
            "StrictHostKeyChecking accept-new",
            "IdentitiesOnly yes",
            "LogLevel ERROR",
        ]
        (self.folder / "config").write_text("\n".join(config) + "\n")
        script = self.folder / "bin" / "ssh"
        script.parent.mkdir()
        script.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.folder / "config"} "$@"\n')
        script.chmod(0o755)
        self.made_run = not Path("/run/sshd").exists()
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd's unprivileged process is confined to it

    def serve(self, index: int, before: str = "true") -> None:
        """Start a host's sshd, after the shell command `before` in the host's network and mount namespaces."""
        options = [
            f"ListenAddress={self.addresses[index]}",
            f"HostKey={self.folder / 'host'}",
            f"AuthorizedKeysFile={self.folder / 'user.pub'}",
            *("StrictModes=no", "PermitRootLogin=yes", "PidFile=none", "UsePAM=no", "MaxStartups=100"),
        ]
        sshd = f"/usr/sbin/sshd -D -e -f /dev/null {' '.join('-o ' + option for option in options)}"
        # `ip netns exec` also gives the command its own mount namespace. With a process namespace of its own, the host
        # does not see the other's processes.
        own = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
        command = ["ip", "netns", "exec", self.spaces[index], *own, "sh", "-c", f"{before} && exec {sshd}"]
        with (self.folder / f"sshd{index}.log").open("a") as log:
            self.servers.append(subprocess.Popen(command, stdout=log, stderr=log))
        self._wait(index, answering=True)

    def change(self, index: int, before: str) -> None:
        """Restart a host's sshd after the shell command `before`, which makes the host different."""
        server = self.servers[index]
        server.kill()
        server.wait()
        self._wait(index, answering=False)  # its child dies after it, and until then has the port
        self.serve(index, before)
        self.servers[index] = self.servers.pop()

    def _wait(self, index: int, answering: bool) -> None:
        """Wait until a host's sshd answers, or no longer does."""
        deadline = time.monotonic() + 20
        while answers(self.addresses[index]) != answering:
            assert time.monotonic() < deadline, (self.folder / f"sshd{index}.log").read_text()
            time.sleep(0.05)

    def cut(self, index: int) -> None:
        """Pull out a host's network cable, without notice."""
        ip("link", "set", f"{self.bridge}{index}", "down")

    def throttle(self, rate: str) -> None:
        """Let no host send faster than `rate` (`50mbit`), by a token bucket on its network card.

        A burst has to hold the largest packet that a veth pair passes on, 64 kB.
        """
        for space in self.spaces:
            bucket = ["tbf", "rate", rate, "burst", "128kb", "latency", "500ms"]
            subprocess.run(["tc", "-n", space, "qdisc", "replace", "dev", "eth0", "root", *bucket], check=True)

    def unthrottle(self) -> None:
        """Let all hosts send as fast as they can."""
        for space in self.spaces:
            subprocess.run(["tc", "-n", space, "qdisc", "delete", "dev", "eth0", "root"], check=True)

    def switch_off(self, index: int) -> None:
        """End every process of a host."""
        self.servers[index].kill()
        self.servers[index].wait()

    def mend(self) -> None:
        """Restore all hosts."""
        for index, server in enumerate(self.servers):
            ip("link", "set", f"{self.bridge}{index}", "up")
            if server.poll() is not None:
                self.change(index, "true")

    def hostfile(self, slots: int = 1, hosts: list[str] | None = None) -> Path:
        """Write a hostfile."""
        path = self.folder / "hosts"
        path.write_text("".join(f"{address} slots={slots}\n" for address in hosts or self.addresses))
        return path

    def environment(self) -> dict[str, str]:
        """Return the environment in which ssh reaches the hosts."""
        return os.environ | {"PATH": f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}:{SBIN}"}


def ip(*arguments: str) -> None:
    """Run iproute2."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def answers(address: str, port: int = 22) -> bool:
    """Return whether a server listens there."""
    with socket.socket() as client:
        client.settimeout(1)
        return client.connect_ex((address, port)) == 0
