#!/bin/sh
# Installs CoServe from the unpacked archive that this file lies in. Needs no network, only Python and a shell.
#
# Every version has a folder of its own in /opt/coserve; `current` names the one in force, and is changed in one step.
# Each step can be repeated: whatever broke off is made good by running the same command again.
set -eu
umask 022
unset PYTHONPATH PYTHONHOME
export PYTHONDONTWRITEBYTECODE=1

usage() {
  cat <<END
usage: install.sh [--force]           install, or upgrade; state and line file stay as they are
       install.sh --rollback          back to the version before
       install.sh --remove [--purge]  remove; --purge: also the line file, the state with all results, and the user
options: --root DIR   below DIR instead of /, without user and service: to look at what it does
         --force      switch also to a version that refuses the line file which the one in force accepts
END
}

say() { printf '%s\n' "$*"; }
fail() { printf 'install.sh: %s\n' "$*" >&2; exit 1; }
told() { sed -n "s/^$1=//p" "$here/BUNDLE"; }  # a line of what the archive says about itself
is_live() { [ -z "$root" ]; }
has_systemd() { is_live && [ -d /run/systemd/system ]; }

main() {
  task=install root= is_purge=no is_forced=no
  while [ $# -gt 0 ]; do
    case $1 in
      --rollback) task=rollback ;;
      --remove) task=remove ;;
      --purge) is_purge=yes ;;
      --force) is_forced=yes ;;
      --root) [ $# -gt 1 ] || fail "--root needs a folder"; root=$(mkdir -p "$2" && cd "$2" && pwd -P); shift ;;
      -h | --help) usage; exit 0 ;;
      *) usage >&2; exit 2 ;;
    esac
    shift
  done
  [ "$is_purge" = no ] || [ "$task" = remove ] || { usage >&2; exit 2; }
  here=$(cd "$(dirname "$0")" && pwd -P)
  home=$root/opt/coserve etc=$root/etc line=$root/etc/coserve/line.yaml
  if is_live && [ "$(id -u)" -ne 0 ]; then fail "needs root: run it with sudo"; fi
  lock
  "$task"
}

lock() {
  mkdir -p "$home"
  if command -v flock >/dev/null; then
    exec 9<"$home"
    flock -n 9 || fail "another install.sh is at work in $home: wait until it has ended"
  fi
}

install() {
  verify
  choose_python
  release=$(told version)-$(sha256sum <"$here/SHA256SUMS" | cut -c1-8)
  if [ -e "$home/$release/.complete" ]; then
    say "$home/$release is complete already"
  else
    look_for_room
    unpack
  fi
  look_at_line_file
  make_user_and_folders "$home/$release/share/coserve"
  [ -e "$line" ] || { cp "$home/$release/share/coserve/line.yaml" "$line"; say "a sample line file: $line"; }
  switch_to "$release"
  forget_old_releases
  restart
  say "CoServe $release is in force: $home/current"
  is_live && next_steps || :
}

verify() {
  [ -e "$here/SHA256SUMS" ] || fail "$here/SHA256SUMS is missing: run install.sh from the unpacked archive"
  say "verifying the archive"
  (cd "$here" && sha256sum --check --quiet SHA256SUMS) || fail "the archive is damaged: copy it to this box again"
}

# The first Python that the wheels are for. PYTHON=/path/to/python3.11 names another one.
choose_python() {
  wanted="$(told tag) $(told platform)"
  seen=
  for python in ${PYTHON:+"$PYTHON"} python3 "python$(told python)"; do
    is=$("$python" -c 'import sys, sysconfig
kind = {"cpython": "cp"}.get(sys.implementation.name, sys.implementation.name)
platform = sysconfig.get_platform().replace("-", "_")
print(f"{kind}{sys.version_info[0]}{sys.version_info[1]}", platform)' 2>/dev/null) || continue
    seen="$seen $python: $is;"
    [ "$is" = "$wanted" ] && break
    is=
  done
  [ -n "${is:-}" ] || fail "needs Python $(told python) on $(told platform); here is${seen:- no python3}" \
    "install python$(told python), or name it as in PYTHON=/path/to/python$(told python) ./install.sh," \
    "or make the archive with this box's version: make bundle PYTHON=python3.x"
  "$python" -c 'import os, sys
have, need = os.confstr("CS_GNU_LIBC_VERSION").split()[1], sys.argv[1]
if [int(part) for part in have.split(".")] < [int(part) for part in need.split(".")]:
    sys.exit(f"install.sh: needs glibc {need} or newer; here is {have}: use a newer release of the system")' \
    "$(told glibc)"
  "$python" -c 'import venv' 2>/dev/null || fail "$python has no venv module: install the package python3"
}

look_for_room() {
  free=$(df -Pk "$home" | awk 'NR == 2 { print $4 }')
  need=$(($(told installed_bytes) / 1024))
  [ "$free" -gt "$need" ] || fail "$home needs $((need / 1024)) MiB, $((free / 1024)) MiB are free:" \
    "make room, or mount a larger disk there"
}

unpack() {
  say "installing $(told version) into $home/$release"
  rm -rf "${home:?}/$release"
  "$python" -m venv --without-pip "$home/$release"
  new=$home/$release/bin/python
  set -- "$here"/wheels/pip-*.whl
  PYTHONPATH=$1 "$new" -P -m pip --isolated install --quiet --no-index --no-deps --no-cache-dir --no-compile \
    --disable-pip-version-check --no-warn-script-location "$here"/wheels/*.whl
  "$new" -I -m pip --isolated check >/dev/null || fail "the archive's packages do not fit together: make it again"
  for module in $(told imports); do
    "$new" -I -c "import $module" || fail "$module does not work on this box: see above"
  done
  # What is not compiled now would be compiled at each start: the service may not write there.
  "$new" -I -m compileall -q -j 0 "$home/$release/lib" >/dev/null || :
  touch "$home/$release/.complete"
}

# A mistake that only the new version sees would end the service: it is told while the old one goes on.
look_at_line_file() {
  [ -e "$line" ] && [ -e "$home/current" ] && [ "$is_forced" = no ] || return 0
  "$home/current/bin/coserve" config check "$line" >/dev/null 2>&1 || return 0
  "$home/$release/bin/coserve" config check "$line" >/dev/null || fail "the new version refuses $line," \
    "see above: the one in force goes on. Correct it, or switch anyway with --force"
}

make_user_and_folders() {
  mkdir -p "$etc/coserve" "$etc/sysusers.d" "$etc/tmpfiles.d" "$etc/systemd/system"
  mkdir -p "$root/var/lib/coserve" "$root/var/cache/coserve"
  cp "$1/coserve.sysusers" "$etc/sysusers.d/coserve.conf"
  cp "$1/coserve.tmpfiles" "$etc/tmpfiles.d/coserve.conf"
  is_live || return 0
  if command -v systemd-sysusers >/dev/null; then
    systemd-sysusers "$etc/sysusers.d/coserve.conf"
  else
    for group in video render coserve; do getent group $group >/dev/null || groupadd --system $group; done
    id coserve >/dev/null 2>&1 || useradd --system --gid coserve --home-dir /var/lib/coserve --no-create-home \
      --shell /usr/sbin/nologin --comment "CoServe inspection agent" coserve
  fi
  if command -v systemd-tmpfiles >/dev/null; then
    systemd-tmpfiles --create "$etc/tmpfiles.d/coserve.conf"
  else
    for folder in /var/lib/coserve /var/cache/coserve; do chown coserve:coserve $folder; chmod 0750 $folder; done
  fi
}

# The version in force, its units, and the command; the one before is remembered.
switch_to() {
  before=$(readlink "$home/current" || :)
  [ -z "$before" ] || [ "$before" = "$1" ] || point previous "$before"
  point current "$1"
  cp "$home/$1/share/coserve/coserve.service" "$home/$1/share/coserve/coserve-profile.service" "$etc/systemd/system/"
  mkdir -p "$root/usr/local/bin"
  ln -sfn "$home/current/bin/coserve" "$root/usr/local/bin/coserve"
  ! has_systemd || systemctl daemon-reload
}

point() {
  ln -sfn "$2" "$home/.$1"
  mv -fT "$home/.$1" "$home/$1"
}

forget_old_releases() {
  for folder in "$home"/*/; do
    name=$(basename "$folder")
    case $name in
      current | previous | "$(readlink "$home/current")" | "$(readlink "$home/previous" || :)") ;;
      *) rm -rf "${home:?}/$name"; say "removed $home/$name" ;;
    esac
  done
}

restart() {
  has_systemd && systemctl is-active --quiet coserve || return 0
  systemctl restart coserve || fail "it does not start: look at systemctl status coserve;" \
    "back to the version before: $home/current/share/coserve/install.sh --rollback"
}

rollback() {
  before=$(readlink "$home/previous" || :)
  [ -n "$before" ] && [ -e "$home/$before/.complete" ] || fail "no version before this one in $home"
  switch_to "$before"
  restart
  say "CoServe $before is in force again: $home/current; --rollback once more undoes this"
}

remove() {
  if has_systemd; then systemctl disable --quiet --now coserve coserve-profile 2>/dev/null || :; fi
  rm -f "$etc/systemd/system/coserve.service" "$etc/systemd/system/coserve-profile.service"
  rm -f "$etc/sysusers.d/coserve.conf" "$etc/tmpfiles.d/coserve.conf" "$root/usr/local/bin/coserve"
  rm -rf "${home:?}"
  ! has_systemd || systemctl daemon-reload
  if [ "$is_purge" = yes ]; then
    rm -rf "$etc/coserve" "$root/var/lib/coserve" "$root/var/cache/coserve" "$etc/systemd/system/coserve.service.d"
    if is_live && id coserve >/dev/null 2>&1; then userdel coserve; fi
    say "CoServe is removed, with all that it kept"
  else
    say "CoServe is removed; kept: $etc/coserve, $root/var/lib/coserve and the user (--remove --purge removes them)"
  fi
}

next_steps() {
  cat <<END
next:
  edit /etc/coserve/line.yaml                          (its weights readable for the user coserve)
  coserve config check /etc/coserve/line.yaml
  systemctl edit coserve                               ([Service] ReadWritePaths=/srv/images, for each watched folder)
  systemctl enable --now coserve                       (comes back when it is ready)
  systemctl status coserve
All of it: /opt/coserve/current/share/doc/service.md
END
}

main "$@"
exit 0
