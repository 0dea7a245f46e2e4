"""`ray up` with machines that are namespaces of this one, each with its own processes, network, home and ``/tmp/ray``.

``test_ray_up.py`` runs this as root of a namespace for all of them (``unshare``). So nothing here is visible outside,
and `ray stop` stops nothing else. Stand-ins are ``ssh`` and ``rsync`` (the one enters a machine, the other copies) and
``sudo`` (which does nothing). The environment of ``python3 -m venv`` and ``pip`` is that of the tests, with the copied
project.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

HEAD, WORKER = "10.77.0.1", "10.77.0.2"
ROOT = Path(__file__).parents[2]
FIRST_AUTOSCALER = {"RAY_UP_enable_autoscaler_v2": "0"}
"""The second one ignores the head on Ray's local provider, and starts no worker there."""
IS_READY = "import urllib.request as client; client.urlopen('http://127.0.0.1:8000/health')"

SSH = """#!{python}
import os, sys
at = next(i for i, word in enumerate(sys.argv) if word.startswith("ubuntu@"))
home = "{folder}/" + sys.argv[at].partition("@")[2]
pid = open(home + ".pid").read().strip()
os.chdir(home)
clean = ["env", "-i", "HOME=" + home, "USER=ubuntu", "PATH=/usr/sbin:/usr/bin:/sbin:/bin"]
enter = ["nsenter", "--target", pid, "--net", "--pid", "--mount", "--wd=" + home]
os.execvp(enter[0], [*enter, *clean, "bash", "-c", " ".join(sys.argv[at + 1 :])])
"""

RSYNC = """#!{python}
import os, shutil, sys
source, (address, _, target) = sys.argv[-2], sys.argv[-1].partition(":")
assert sys.argv[-1].startswith("ubuntu@"), sys.argv
target = target.replace("~", "{folder}/" + address.partition("@")[2], 1)
if os.path.isdir(source):
    shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
else:
    shutil.copy(source, target)
"""

PYTHON3 = """#!/bin/bash
# As `python3 -m venv DIR` would leave it, once `pip install` has been there.
[ "$1 $2" = "-m venv" ] || exec {python} "$@"
mkdir -p "$3/bin"
for name in python:"" ray:"-m ray.scripts.scripts" serve:"-m ray.serve.scripts" troupe:"-m deployments.cli.main"; do
    printf '#!/bin/bash\\nPYTHONPATH=%s exec {python} %s "$@"\\n' "$HOME/troupe" "${{name#*:}}" > "$3/bin/${{name%%:*}}"
done
printf '#!/bin/bash\\necho "$(pwd) $*" >> %s\\n' "$HOME/pip.log" > "$3/bin/pip"
chmod +x "$3"/bin/*
"""

SUDO = """#!/bin/bash
echo "$*" >> "$HOME/sudo.log"
"""


def write_programs(folder: Path) -> None:
    (folder / "bin").mkdir()
    for name, text in {"ssh": SSH, "rsync": RSYNC, "python3": PYTHON3, "sudo": SUDO}.items():
        program = folder / "bin" / name
        program.write_text(text.format(python=sys.executable, folder=folder))
        program.chmod(0o755)


COUNT = "pgrep --count --full"
"""The head sees the worker's processes too."""
BOOT = """
set -e
machine() {{ # which starts, and of which the process is written to where ssh looks
    unshare --net --pid --mount --fork --mount-proc --kill-child \\
        bash -c 'mount -t tmpfs tmpfs /tmp/ray; ip link set lo up; while :; do sleep 1 & wait; done' &
    until pgrep -P $! > "$1"; do sleep 0.05; done
}}
if [ -z "$IS_HEAD" ]; then
    mkdir -p /tmp/ray
    machine {folder}/{head}.pid
    IS_HEAD=1 nsenter --target "$(cat {folder}/{head}.pid)" --net --pid --mount bash "$0"
else
    machine {folder}/{worker}.pid
    pid=$(cat {folder}/{worker}.pid)
    ip link add name wire type veth peer name wire netns "$pid"
    ip addr add {head}/24 dev wire
    ip link set wire up
    ip route add default dev wire
    nsenter --target "$pid" --net \\
        bash -c 'ip addr add {worker}/24 dev wire; ip link set wire up; ip route add default dev wire'
fi
"""


def boot(folder: Path) -> None:
    """Boot two machines: the head, and inside it, so that only it can reach it, the worker."""
    for address in (HEAD, WORKER):
        (folder / address).mkdir()
        (folder / address / ".bashrc").write_text(f'export PATH="{folder}/bin:$PATH"\n')
    script = folder / "boot.sh"
    script.write_text(BOOT.format(folder=folder, head=HEAD, worker=WORKER))
    subprocess.run(["bash", str(script)], check=True, stdout=subprocess.DEVNULL)


class Laptop:
    """The machine that runs `ray up`, in the root of the repository: a home, and ``ssh`` to the head."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._home = folder, folder / "laptop"
        self._home.mkdir()

    def run(self, *command: str) -> str:
        """Return the output of a command that succeeds."""
        path = f"{self._folder}/bin:{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
        environment = {"HOME": str(self._home), "USER": "somebody", "PATH": path, "TERM": "dumb"} | FIRST_AUTOSCALER
        run = subprocess.run(command, env=environment, cwd=ROOT, text=True, capture_output=True, check=False)
        print(*command, run.stdout, run.stderr, sep="\n", file=sys.stderr, flush=True)
        run.check_returncode()
        return run.stdout

    def ray(self, *arguments: str) -> str:
        return self.run(sys.executable, "-m", "ray.scripts.scripts", *arguments)

    def on_head(self, command: str) -> str:
        return self.run("ssh", f"ubuntu@{HEAD}", f"source ~/.bashrc; {command}")

    def on_worker(self, command: str) -> str:
        return self.on_head(f"ssh ubuntu@{WORKER} {shlex.quote(command)}")


def main() -> None:
    """Run the commands in the cluster file's head on machines in the folder, which is the only argument."""
    folder = Path(sys.argv[1])
    cluster, config = str(folder / "cluster.yaml"), folder / "config.yaml"
    write_programs(folder)
    boot(folder)
    laptop = Laptop(folder)
    laptop.ray("get-auth-token", "--generate")
    laptop.ray("up", "--yes", "--no-config-cache", cluster)
    shutil.copy(config, folder / HEAD)
    laptop.ray("exec", cluster, "serve deploy ~/config.yaml")
    laptop.on_head(f"until python -c {shlex.quote(IS_READY)}; do sleep 1; done")
    laptop.ray("exec", cluster, "troupe generate 'a red circle' --seed 1 --out picture.png")
    seen = {
        "imported": laptop.on_head("python -c 'import deployments; print(deployments.__file__)'").strip(),
        "ranks": int(laptop.on_head(f"{COUNT} ^ray::Rank")),
        "on the worker": int(laptop.on_worker(f"{COUNT} '^ray::(Rank|ServeReplica)'")),
    }
    laptop.ray("down", "--yes", cluster)
    (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
