#!/bin/sh
# Proves an archive of `make bundle` in a bare Debian 12 that has no network: from the archive to a judged image and a
# service that is ready, then an upgrade, the way back, and nothing left after the removal. Says how long each took.
#
#   sudo packaging/prove-bundle.sh dist/coserve-*.tar [FOLDER]
#
# FOLDER (default: a new one in /var/tmp) takes the Debian, made by debootstrap where it is not there yet, and about
# three times the archive; it is removed unless it was named. The Debian boots its own systemd in namespaces of its own:
# network (with nothing in it), PID, mount, UTS, IPC and cgroup. Not part of the tests: gigabytes, and ten minutes.
set -eu

[ $# -ge 1 ] || { sed -n '5s/^#  *//p' "$0" >&2; exit 2; }
[ "$(id -u)" -eq 0 ] || { echo "prove-bundle.sh: needs root, for debootstrap and namespaces" >&2; exit 1; }
archive=$(realpath "$1") name=$(basename "$1" .tar)
folder=${2:-$(mktemp -d /var/tmp/coserve-proof.XXXXXX)}
debian=$folder/debian
mkdir -p "$folder"
cgroup=$(awk '$3 == "cgroup2" { print $2; exit }' /proc/mounts)$(sed -n 's/^0:://p' /proc/self/cgroup)/coserve-proof-$$
box=

leave() {
  [ -z "$box" ] || kill -KILL "$box" 2>/dev/null || :
  wait
  until rmdir_all "$cgroup"; do sleep 0.1; done
  [ -n "${2:-}" ] || rm -rf "$folder"
}
rmdir_all() { [ ! -d "$1" ] || find "$1" -depth -type d -exec rmdir {} + 2>/dev/null; }
trap 'leave "$@"' EXIT
trap 'exit 143' HUP INT TERM

say() { printf '\n== %s\n' "$*"; }
timed() {  # what, command...
  what=$1 since=$(date +%s.%N)
  shift
  "$@"
  printf '== %s: %.1f s\n' "$what" "$(passed "$since")"
}
passed() { echo "$(date +%s.%N) $1" | awk '{ print $1 - $2 }'; }
inside() { nsenter --target="$box" --mount --pid --net --uts --ipc --cgroup --root --wd /bin/sh -euc "$1"; }

if [ ! -e "$debian/etc/debian_version" ]; then
  say "a bare Debian 12: python3, systemd and nothing else"
  debootstrap --variant=minbase --include=python3,systemd,systemd-sysv,dbus bookworm "$debian" >"$folder/debian.log"
fi

# The Debian boots: its systemd is PID 1 of a machine that has no network and sees none of this one's mounts.
mkdir -p "$cgroup" "$debian/mnt"
cat >"$folder/boot" <<'END'
set -e
mount --make-rprivate /
mount --bind "$1" "$1"
cd "$1"
mount --bind "$2" mnt && mount -o remount,bind,ro mnt
mount -t proc proc proc
mount --bind proc/sys proc/sys && mount -o remount,bind,ro proc/sys
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs dev
for node in null zero full random urandom tty; do : >dev/$node; mount --bind /dev/$node dev/$node; done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=666 devpts dev/pts
mount -t tmpfs tmpfs dev/shm
: >dev/console
for place in run tmp var/tmp; do mount -t tmpfs tmpfs $place; done
mkdir -p run/old
pivot_root . run/old
umount -l /run/old
mount --make-rshared /  # as systemd expects it: credentials come to a service by propagation
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --system \
  --unit=multi-user.target --log-target=null --show-status=false
END
(
  echo 0 >"$cgroup/cgroup.procs"
  exec timeout --kill-after=5 1800 unshare --net --pid --mount --uts --ipc --cgroup --fork --kill-child=SIGKILL \
    /bin/sh "$folder/boot" "$debian" "$(dirname "$archive")" </dev/null >"$folder/boot.log" 2>&1
) &
timer=$!
for _ in $(seq 600); do
  unshared=$(cat "/proc/$timer/task/$timer/children" 2>/dev/null || :)
  [ -z "$unshared" ] || box=$(tr -d ' ' <"/proc/${unshared% }/task/${unshared% }/children")
  case $([ -z "$box" ] || nsenter --target="$box" --mount --pid --root systemctl is-system-running 2>/dev/null) in
    running | degraded) break ;;
  esac
  kill -0 $timer 2>/dev/null || { cat "$folder/boot.log" >&2; exit 1; }
  sleep 0.1
done
say "the box: $(inside 'echo "Debian $(cat /etc/debian_version), $(python3 --version), $(nproc) cores"')"
inside 'echo "network devices: $(sed 1,2d /proc/net/dev | cut -d: -f1 | xargs)"; systemctl is-system-running || :'

say "from the archive to a judged image"
began=$(date +%s.%N)
ls -l "$archive"
timed "unpacked" inside "cd /root && tar xf /mnt/$name.tar"
timed "installed" inside "/root/$name/install.sh"
# Real networks with random weights: what they answer says nothing, that they answer is what is to be proved.
cat >"$debian/root/make_line.py" <<'END'
import torch, torchvision
from PIL import Image
from pathlib import Path
from safetensors.torch import save_file
torch.manual_seed(0)
weights = Path("/etc/coserve/weights")
weights.mkdir(exist_ok=True)
lines = ["line: proof", "state: /var/lib/coserve", "experts:"]
for name in ("resistor", "capacitor"):
    save_file(torchvision.models.resnet18(num_classes=2).state_dict(), weights / f"{name}.safetensors")
    lines.append(f"  cls/{name}: {{architecture: resnet18, weights: weights/{name}.safetensors, labels: [ok, bad], "
                 "input: {size: [64, 64]}}")
lines += ["routes:", *(f"  {name}: [{{expert: cls/{name}, pass: [ok]}}]" for name in ("resistor", "capacitor"))]
lines.append("intake: {folders: [{path: /srv/images, pattern: "
             r"'(?P<board>[^_]+)_(?P<component>[^_]+)_(?P<ref>[^.]+)\.png'}]}")
Path("/etc/coserve/line.yaml").write_text("\n".join(lines) + "\n")
Image.new("RGB", (80, 60), (10, 200, 30)).save("/root/B1_resistor_R1.png")
END
inside 'cd /root && /opt/coserve/current/bin/python make_line.py'
timed "judged by coserve inspect" inside 'cd /root && COSERVE__STATE=/tmp/trial coserve inspect /etc/coserve/line.yaml \
  B1_resistor_R1.png --component resistor'

say "as a service"
inside 'coserve config check /etc/coserve/line.yaml
  install -d -o coserve -g coserve /srv/images
  chmod -R a+rX /etc/coserve/weights  # the service is another user
  mkdir -p /etc/systemd/system/coserve.service.d
  printf "[Service]\nReadWritePaths=/srv/images\n" >/etc/systemd/system/coserve.service.d/images.conf
  systemctl daemon-reload'
timed "ready, packed weights included" inside 'systemctl enable --now coserve'
inside 'systemctl status --no-pager --lines=3 coserve'
cat >"$folder/judge" <<'END'
cp /root/B1_resistor_R1.png /srv/images/.new && mv /srv/images/.new "/srv/images/$1_resistor_R1.png"
for _ in $(seq 600); do
  [ -z "$(find /srv/images/done /srv/images/ng /srv/images/failed -name "$1_*.png" 2>/dev/null)" ] || break
  sleep 0.1
done
row=$(coserve results /etc/coserve/line.yaml | tail -1)
echo "$row"
case $row in *"$1_resistor_R1.png"*'"verdict": "OK"'* | *"$1_resistor_R1.png"*'"verdict": "NG"'*) ;; *) exit 1 ;; esac
END
cp "$folder/judge" "$debian/root/judge"
timed "judged by the service" inside 'sh /root/judge B1'
printf '== from the archive to all of this: %.0f s\n' "$(passed "$began")"
inside 'systemctl reload coserve; systemctl kill --signal=KILL --kill-whom=main coserve'
inside 'sh /root/judge B2; systemctl show --property=ActiveState,NRestarts,StatusText coserve'

say "an upgrade, and back"
# The same packages under another version: the archive has one only.
inside "cd /root/$name && sed -i 's/^version=/version=9./' BUNDLE && grep -v '  BUNDLE' SHA256SUMS >/root/sums
  { cat /root/sums; sha256sum BUNDLE; } >SHA256SUMS"
timed "upgraded, service restarted" inside "/root/$name/install.sh"
inside "readlink /opt/coserve/current; systemctl is-active coserve; sh /root/judge B3"
timed "rolled back, service restarted" inside '/opt/coserve/current/share/coserve/install.sh --rollback'
inside "readlink /opt/coserve/current; systemctl is-active coserve; sh /root/judge B4"
inside 'coserve results /etc/coserve/line.yaml; du -sh /opt/coserve/* | sed "s/^/    /"'

say "removed"
inside '/opt/coserve/current/share/coserve/install.sh --remove'
inside 'ls -d /opt/coserve /etc/coserve /var/lib/coserve /etc/systemd/system/coserve* 2>&1 || :'
inside "/root/$name/install.sh --remove --purge"
inside '! ls -d /opt/coserve /etc/coserve /var/lib/coserve /etc/systemd/system/coserve* /usr/local/bin/coserve
  ! id coserve 2>/dev/null
  echo "packets on the only device: $(sed 1,2d /proc/net/dev | xargs)"'
say "proved"
