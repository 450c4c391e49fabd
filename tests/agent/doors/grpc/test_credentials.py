"""Who is let in at HOST:PORT, with certificates that the `openssl` command makes."""

import shutil

import grpc
import pytest
from pydantic import ValidationError

from agent.doors.grpc.client import Access, AgentClient
from agent.doors.proto import inspection_pb2 as pb
from agent.doors.proto import inspection_pb2_grpc
from agent.faults.errors import AgentUnreachable, SecretMissing
from experts.errors import ConfigError
from tests.agent.doors.conftest import section, server_of
from tests.authority import Authority

DEADLINE_S = 30.0
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Certificates: `ours` signs box and caller, `theirs` signs other."""
    folder = tmp_path_factory.mktemp("certificates")
    ours, theirs = Authority(folder, "ours"), Authority(folder, "theirs")
    for name in ("box", "renewed", "caller"):
        ours.sign(name)
    for name in ("other", "stranger"):
        theirs.sign(name)
    return folder


@pytest.fixture
def files(tmp_path, made):
    """The same in a folder of the test's own, where it may change them."""
    for file in made.iterdir():
        shutil.copy(file, tmp_path)
    return tmp_path


def ask(address, token=None, **credentials):
    """Ask the agent there; PEM files by name. Raises grpc.RpcError."""
    metadata = () if token is None else (("authorization", token),)
    pem = grpc.ssl_channel_credentials(**{name: file.read_bytes() for name, file in credentials.items()})
    with grpc.secure_channel(address, pem) if credentials else grpc.insecure_channel(address) as channel:
        stub = inspection_pb2_grpc.InspectionStub(channel)
        return stub.Status(pb.StatusRequest(), timeout=DEADLINE_S, metadata=metadata).line


def refused(*given, **named):
    with pytest.raises(grpc.RpcError) as error:
        ask(*given, **named)
    return error.value.code()


TLS = {"certificate": "box.pem", "key": "box.key"}


def tls(folder, **keys):
    return {name: folder / file for name, file in (TLS | keys).items()}


@needs_openssl
class TestCertificates:
    def test_caller_that_trusts_the_authority_is_answered_and_plain_text_refused(self, serve, files):
        unix, tcp = serve(tls=tls(files)).addresses
        assert ask(unix) == ask(tcp, root_certificates=files / "ours.pem") == "test"
        assert refused(tcp, root_certificates=files / "theirs.pem") is grpc.StatusCode.UNAVAILABLE
        assert refused(tcp) is grpc.StatusCode.UNAVAILABLE

    @pytest.mark.parametrize("trusted", ["ours", "box"], ids=["its authority", "the certificate itself"])
    def test_command_lines_caller_is_answered_over_tls(self, serve, files, trusted):
        tcp = serve(tls=tls(files, client_ca="ours.pem")).addresses[1]
        pem = {name: (files / name).read_bytes() for name in (f"{trusted}.pem", "caller.pem", "caller.key")}
        access = Access(authority=pem[f"{trusted}.pem"], certificate=pem["caller.pem"], key=pem["caller.key"])
        with AgentClient(tcp, access) as client:
            assert client.status().line == "test"
        with AgentClient(tcp) as client, pytest.raises(AgentUnreachable, match="no answer"):
            client.status()

    def test_caller_with_a_foreign_or_no_certificate_is_refused(self, serve, files):
        tcp = serve(tls=tls(files, client_ca="ours.pem")).addresses[1]
        trust = {"root_certificates": files / "ours.pem"}

        def shown(name):
            return {"certificate_chain": files / f"{name}.pem", "private_key": files / f"{name}.key"}

        assert ask(tcp, **trust, **shown("caller")) == "test"
        assert refused(tcp, **trust) is grpc.StatusCode.UNAVAILABLE
        assert refused(tcp, **trust, **shown("stranger")) is grpc.StatusCode.UNAVAILABLE

    def test_reload_takes_a_new_certificate_while_calls_go_on(self, serve, files, desk):
        """Rotation. The new one is another authority's, so that the caller sees which it is shown."""
        server = serve(tls=tls(files))
        tcp = server.addresses[1]
        pem = (files / "ours.pem").read_bytes()
        with grpc.secure_channel(tcp, grpc.ssl_channel_credentials(pem)) as channel:
            agent = inspection_pb2_grpc.InspectionStub(channel)
            desk.holds = True
            under_way = agent.Inspect.future(pb.InspectRequest(file=b"x", component="resistor"), timeout=DEADLINE_S)
            desk.wait_for(lambda desk: desk.under_way)
            for end in ("pem", "key"):
                shutil.copy(files / f"other.{end}", files / f"box.{end}")
            server.credentials.reload(section(files, tls=tls(files)))
            assert ask(tcp, root_certificates=files / "theirs.pem") == "test"
            assert refused(tcp, root_certificates=files / "ours.pem") is grpc.StatusCode.UNAVAILABLE
            desk.release()
            assert under_way.result(DEADLINE_S).parts

    def test_reload_with_broken_certificates_keeps_the_old_ones(self, serve, files):
        server = serve(tls=tls(files))
        shutil.copy(files / "renewed.key", files / "box.key")  # which is not the certificate's
        with pytest.raises(ConfigError, match=r"box\.pem"):
            server.credentials.reload(section(files, tls=tls(files)))
        assert ask(server.addresses[1], root_certificates=files / "ours.pem") == "test"

    @pytest.mark.parametrize("name", ["certificate", "key", "client_ca"])
    def test_invalid_certificate_files_are_named_before_serving(self, files, desk, name):
        (files / "broken").write_text("no PEM")
        for file in ("broken", "absent"):
            with pytest.raises(ConfigError, match=file):
                server_of(section(files, tls=tls(files, **{name: file})), desk)


def test_address_reachable_from_other_machines_needs_tls_or_insecure_ok(tmp_path):
    with pytest.raises(ValidationError, match="can be reached from other machines"):
        section(tmp_path, grpc="0.0.0.0:8461")
    assert section(tmp_path, grpc="0.0.0.0:8461", insecure_ok=True)


class TestTokens:
    @pytest.fixture
    def token(self, tmp_path):
        (tmp_path / "token").write_text("s3cret\n")
        return {"file": tmp_path / "token"}

    def test_call_with_the_right_token_is_answered_and_any_other_refused(self, serve, token):
        unix, tcp = serve(token=token).addresses
        assert ask(unix) == ask(tcp, "Bearer s3cret") == ask(tcp, "bearer s3cret") == "test"
        for shown in (None, "", "Bearer ", "Bearer s3cre", "Bearer s3cret2", "Basic s3cret", "s3cret"):
            assert refused(tcp, shown) is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.RpcError, match="authorization: Bearer TOKEN") as error:
            ask(tcp)
        assert dict(error.value.trailing_metadata()) == {"coserve-reason": "UNAUTHENTICATED"}
        with AgentClient(tcp, Access(token="s3cret")) as client:
            assert client.status().line == "test"

    def test_every_grpc_service_needs_the_token(self, serve, token):
        with grpc.insecure_channel(serve(token=token).addresses[1]) as channel:
            of_services = ("grpc.health.v1.Health/Watch", "inference.GRPCInferenceService/ServerLive",
                           "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")  # fmt: skip
            for method in ("coserve.v1.Inspection/InspectStream", *of_services):
                with pytest.raises(grpc.RpcError) as error:
                    list(channel.stream_stream(f"/{method}")(iter([b""]), timeout=DEADLINE_S))
                assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED, method

    def test_reload_takes_a_new_token(self, serve, token, tmp_path):
        server = serve(token=token)
        (tmp_path / "token").write_text("new")
        server.credentials.reload(section(tmp_path, token=token))
        tcp = server.addresses[1]
        assert ask(tcp, "Bearer new") == "test"
        assert refused(tcp, "Bearer s3cret") is grpc.StatusCode.UNAUTHENTICATED

    def test_missing_token_file_is_named_before_serving(self, tmp_path, desk):
        with pytest.raises(SecretMissing, match="absent"):
            server_of(section(tmp_path, token={"file": "absent"}), desk)
