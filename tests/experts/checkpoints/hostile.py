"""Hostile and damaged files of torch.save, any number of them: the same ones for the same seed."""

import collections
import ctypes
import io
import os
import pickle
import random
import runpy
import shutil
import socket
import struct
import subprocess
import zipfile
from pathlib import Path

import torch

VARIABLE = "CANARY_OF_THE_READER"
INTERESTING = (0, 1, 0x7F, 0x80, 0xFF, *b"(.})]0Q\x81\x85\x86\x87\x8c\x93\x94RcNbstueghjqrIX")


class Calling:
    """Calls what it is given when pickle reads it, and then what was returned, and so on."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


class Described(pickle.Pickler):
    """Writes tensors' storages as references, with any number of elements."""

    def persistent_id(self, value):
        return ("storage", *value.told) if isinstance(value, Place) else None


class Place:
    def __init__(self, *told):
        self.told = told


def attacks(marker, port):
    """What leaves a file, a connection or a variable behind if any of it is run, or takes all memory."""
    code = f"import os; os.environ[{VARIABLE!r}] = '1'; open({str(marker)!r}, 'w')"
    inner = pickle.dumps(Calling(os.system, f"touch {marker}"))
    rebuild = torch._utils._rebuild_tensor_v2
    return [
        Calling(os.system, f"touch {marker}"), Calling(eval, f"open({str(marker)!r}, 'w')"), Calling(exec, code),
        Calling(open, str(marker), "w"), Calling(os.putenv, VARIABLE, "1"), Calling(os.mkdir, str(marker)),
        Calling(socket.create_connection, ("127.0.0.1", port)), Calling(subprocess.Popen, ["touch", str(marker)]),
        Calling(subprocess.check_output, f"touch {marker}"), Calling(pickle.loads, inner),
        Calling(runpy.run_path, str(marker)), Calling(shutil.rmtree, str(marker)), Calling(ctypes.CDLL, str(marker)),
        Calling(torch.load, str(marker)), Calling(torch.hub.load, "somebody/something", "model"),
        Calling(torch.storage._load_from_bytes, inner), Calling(__import__, "antigravity"),
        Calling(Path.touch, marker), Calling(compile, code, "x", "exec"), Calling(getattr, Path(marker), "touch"),
        Calling(torch.nn.Linear, 10**9, 10**9), Calling(bytearray, 1 << 40), Calling(range, 1 << 60),
        Calling(str.__mul__, "x", 1 << 40), Calling(collections.OrderedDict, [("a", 1)] * 3),
        Calling(rebuild, Place(torch.FloatStorage, "0", "cpu", 1 << 40), 0, (1 << 40,), (1,), False, {}),
        Calling(rebuild, Place(torch.FloatStorage, "0", "cpu", 8), 7, (8,), (1,), False, {}),
        Calling(rebuild, Place(torch.FloatStorage, "0", "cpu", 8), 0, (1 << 40, 1 << 20), (0, 0), False, {}),
        Calling(rebuild, Place(torch.FloatStorage, "9", "cpu", 8), 0, (8,), (1,), False, {}),
        Calling(rebuild, Place(torch.FloatStorage, "../0", "cpu", 8), 0, (8,), (1,), False, {}),
    ]  # fmt: skip


def archive(description, storage=bytes(32), compression=zipfile.ZIP_STORED, prefix="x"):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as made:
        made.writestr(f"{prefix}/data.pkl", description)
        made.writestr(f"{prefix}/data/0", storage)
        made.writestr(f"{prefix}/version", "3\n")
    return file.getvalue()


def described(document, protocol=2):
    file = io.BytesIO()
    Described(file, protocol).dump(document)
    return file.getvalue()


def saved(document, zipped=True):
    file = io.BytesIO()
    torch.save(document, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def bases():
    """What is damaged: small files of each form."""
    module = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))
    optimizer = torch.optim.Adam(module.parameters())
    document = {
        "model": module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1, "names": {0: "a", 1: "b"},
    }  # fmt: skip
    wholes = [saved(one, zipped) for one in (module.state_dict(), module, document) for zipped in (True, False)]
    return [*wholes, archive(described({"a": 1}), compression=zipfile.ZIP_DEFLATED)]


def stream_bombs():
    """Pickles that are no object's: they ask for more than there is."""
    return [
        b"\x80\x02" + b"(" * 500_000 + b".", b"\x80\x02]" + b"\x85" * 500_000 + b".", b"\x80\x04}" + b"\x94" * 100_000,
        b"\x80\x02]" + b"2\x86" * 3000 + b"}2s.",
        b"\x80\x02]r\xff\xff\xff\xff.", b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62), b"\x80\x02\x8b\xff\xff\xff\x7f",
        b"\x80\x04\x95" + struct.pack("<Q", (1 << 64) - 1) + b"N.", b"\x80\x02I" + b"9" * 60_000 + b"\n.",
        b"\x80\x02]q\x00" + b"h\x00a" * 1000 + b".", b"\x80\x02ctorch\nload\n" + b")R" * 1000 + b".",
        b"\x80\x02c" + b"a." * 20_000 + b"\nb\n)R.", b"\x80\x02(" + b"K\x01" * 99_999 + b"u.",
    ]  # fmt: skip


def process_bombs():
    """Pickles that end the process that reads them: a key too deep to be hashed, and one that takes for ever."""
    return [b"\x80\x02}]" + b"\x85" * 3_000_000 + b"Ns.", b"\x80\x02}N" + b"2\x86" * 3000 + b"Ns."]


def bomb_archives():
    many = io.BytesIO()
    with zipfile.ZipFile(many, "w") as made:
        for number in range(2000):
            made.writestr(f"x/data/{number}", b"")
    return [
        archive(described({}), bytes(80_000_000), zipfile.ZIP_DEFLATED), archive(described({}), prefix="../../x"),
        archive(described({}), prefix="/etc"), many.getvalue(), archive(b""), b"PK\x05\x06" + bytes(18), b"PK", b"\x80",
        zipfile_with_two_names(),
    ]  # fmt: skip


def zipfile_with_two_names():
    return archive(described({"a": 1})).replace(b"x/data/0", b"x/data.p")


def damaged(content, draw):
    """A few bytes changed, cut out, doubled or put in."""
    content = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 4, 16))):
        at = draw.randrange(len(content)) if content else 0
        match draw.randrange(5):
            case 0:
                content[at : at + 1] = bytes([draw.choice(INTERESTING)])
            case 1:
                del content[at : at + draw.choice((1, 4, 64))]
            case 2:
                content[at:at] = content[at : at + draw.choice((1, 8, 200))]
            case 3:
                content[at : at + 4] = struct.pack("<L", draw.choice((0, 1, 0x7FFFFFFF, 0xFFFFFFFF, len(content))))
            case _:
                content[at : at + 1] = bytes([draw.randrange(256)])
    return bytes(content)


def damaged_description(content, draw):
    """An archive whose checksums are right, and whose pickle is damaged."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            one = old.read(name)
            new.writestr(name, damaged(one, draw) if name.endswith("data.pkl") else one)
    return file.getvalue()


def hostile_files(count, seed, marker, port):
    """``count`` files, each as bytes: attacks in each form first, then damage to whole files and to attacks."""
    draw = random.Random(seed)
    calls = attacks(marker, port)
    files = [*bomb_archives(), *map(archive, stream_bombs()), *stream_bombs()]
    for protocol in (0, 2, 4):
        pickled = [described({"a": call, "model": {"b": call}}, protocol) for call in calls]
        files += [*pickled, *map(archive, pickled)]
    whole = bases()
    zipped = [one for one in (*whole, *files) if one.startswith(b"PK\x03\x04") and len(one) < 20_000]
    while len(files) < count:
        if draw.random() < 0.5:
            files.append(damaged(draw.choice(whole), draw))
        else:
            try:
                files.append(damaged_description(draw.choice(zipped), draw))
            except zipfile.BadZipFile:  # one that no archive can be made of again
                continue
    return files[:count]
