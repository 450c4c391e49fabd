"""Certificates that the `openssl` command makes."""

import subprocess

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Authority:
    """A certificate authority in a folder: NAME.pem and NAME.key."""

    def __init__(self, folder, name):
        self.folder, self.name = folder, name
        self._openssl("req", "-x509", *KEY, "-days", "2", "-keyout", f"{name}.key", "-out", f"{name}.pem",
                      "-subj", f"/CN={name}", "-addext", "keyUsage=critical,keyCertSign")  # fmt: skip

    def sign(self, name):
        """Certificate and key of localhost, as files NAME.pem and NAME.key."""
        self._openssl("req", *KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (self.folder / "san").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        self._openssl("x509", "-req", "-in", f"{name}.csr", "-CA", f"{self.name}.pem", "-CAkey", f"{self.name}.key",
                      "-CAcreateserial", "-days", "2", "-extfile", "san", "-out", f"{name}.pem")  # fmt: skip

    def _openssl(self, *words):
        subprocess.run(["openssl", *words], cwd=self.folder, check=True, capture_output=True, timeout=60)
