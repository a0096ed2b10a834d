"""Our subset of Envoy's protos says what Envoy says: every message, field, enum value and method, and their bytes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FileDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.message_factory import GetMessageClass

from tests.support.proto_peer import (
    RENAMED,
    build_theirs,
    enum_differences,
    fill_ours,
    filled,
    message_differences,
    peer_message,
    plain,
    service_differences,
    their_fields,
)

PROTOS = Path(__file__).parents[2] / "protos"


def load(path: str) -> FileDescriptor:
    module: Any = importlib.import_module(f"extproc.pb.{path.removesuffix('.proto').replace('/', '.')}_pb2")
    return cast(FileDescriptor, module.DESCRIPTOR)


def messages_of(container: Any) -> Iterator[Descriptor]:
    nested = getattr(container, "message_types_by_name", None) or getattr(container, "nested_types_by_name", {})
    for message in nested.values():
        if not message.GetOptions().map_entry:
            yield message
            yield from messages_of(message)


def enums_of(file: FileDescriptor) -> list[EnumDescriptor]:
    nested = [enum for message in messages_of(file) for enum in message.enum_types]
    return [*file.enum_types_by_name.values(), *nested]


FILES = [load(path.relative_to(PROTOS).as_posix()) for path in sorted(PROTOS.rglob("*.proto"))]
MESSAGES = [message for file in FILES for message in messages_of(file)]
ENUMS = [enum for file in FILES for enum in enums_of(file)]
SERVICES: list[ServiceDescriptor] = [service for file in FILES for service in file.services_by_name.values()]


def by_name(descriptor: Any) -> str:
    return str(descriptor.full_name)


class TestDeclarations:
    def test_files_lie_where_their_package_says(self) -> None:
        assert len(FILES) == 12
        for file in FILES:
            assert file.name.removeprefix("extproc/pb/").rpartition("/")[0] == file.package.replace(".", "/")

    @pytest.mark.parametrize("message", MESSAGES, ids=by_name)
    def test_message(self, message: Descriptor) -> None:
        assert message_differences(message) == []

    @pytest.mark.parametrize("enum", ENUMS, ids=by_name)
    def test_enum(self, enum: EnumDescriptor) -> None:
        assert enum_differences(enum) == []

    @pytest.mark.parametrize("service", SERVICES, ids=by_name)
    def test_service(self, service: ServiceDescriptor) -> None:
        assert service_differences(service) == []

    @pytest.mark.parametrize(
        "name",
        [
            "envoy.data.accesslog.v3.ResponseFlags",
            "envoy.data.accesslog.v3.HTTPAccessLogEntry",
            "envoy.data.accesslog.v3.HTTPRequestProperties",
            "envoy.data.accesslog.v3.HTTPResponseProperties",
            "envoy.extensions.filters.http.ext_proc.v3.ProcessingMode",
            "envoy.service.ext_proc.v3.ImmediateResponse",
            "envoy.service.ext_proc.v3.CommonResponse",
        ],
    )
    def test_message_has_all_fields(self, name: str) -> None:
        message = next(message for message in MESSAGES if message.full_name == name)
        peer = peer_message(message)
        assert peer is not None
        assert {field.name for field in message.fields} == set(their_fields(peer)[0])

    def test_only_one_message_bears_a_name_of_ours(self) -> None:
        assert {name for name in map(by_name, MESSAGES) if name in RENAMED} == set(RENAMED)


class TestMethods:
    """What the generated stubs call: gRPC goes by the path and by which sides stream."""

    EXPECTED: ClassVar = {
        "/envoy.service.ext_proc.v3.ExternalProcessor/Process": "stream_stream",
        "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs": "stream_unary",
        "/envoy.service.endpoint.v3.EndpointDiscoveryService/StreamEndpoints": "stream_stream",
    }

    def test_client_stubs(self) -> None:
        called: dict[str, str] = {}

        class Channel:
            def __getattr__(self, kind: str) -> Callable[..., None]:
                return lambda path, **_: called.__setitem__(path, kind)

        for service in SERVICES:
            module = service.file.name.removesuffix(".proto").replace("/", ".")
            getattr(importlib.import_module(f"{module}_pb2_grpc"), f"{service.name}Stub")(Channel())
        assert called == self.EXPECTED


class TestBytes:
    @pytest.mark.filterwarnings("ignore:HeaderValueOption.append is deprecated:DeprecationWarning")
    @pytest.mark.parametrize("message", MESSAGES, ids=by_name)
    def test_both_read_what_the_other_wrote(self, message: Descriptor) -> None:
        cls, peer = GetMessageClass(message), peer_message(message)
        assert peer is not None
        for choice in range(max([1, *(len(oneof.fields) for oneof in reachable_oneofs(message))])):
            value = filled(message, choice)
            ours, theirs = fill_ours(cls(), value), build_theirs(peer, value)
            assert plain(ours) == value
            assert plain(theirs) == value
            read_by_them = peer.parse(ours.SerializeToString())
            assert plain(read_by_them) == value
            assert cls.FromString(bytes(read_by_them)) == ours
            read_by_us = cls.FromString(bytes(theirs))
            assert plain(read_by_us) == value
            assert peer.parse(read_by_us.SerializeToString()) == theirs

    def test_every_field_takes_part(self) -> None:
        for message in MESSAGES:
            choices = max([1, *(len(oneof.fields) for oneof in message.oneofs)])
            seen = {name for choice in range(choices) for name in filled(message, choice)}
            assert seen == {field.name for field in message.fields}


def reachable_oneofs(message: Descriptor, seen: set[str] | None = None) -> Iterator[Any]:
    seen = set() if seen is None else seen
    if message.full_name in seen or message.full_name.startswith("google."):
        return
    seen.add(message.full_name)
    yield from message.oneofs
    for field in message.fields:
        if field.message_type:
            yield from reachable_oneofs(field.message_type, seen)


# ---- the checks above can fail ----


def mutated(file: FileDescriptor, change: Callable[[FileDescriptorProto], None]) -> FileDescriptor:
    """The file as it would be with ``change`` made to it, in a descriptor pool of its own."""
    pool = descriptor_pool.DescriptorPool()

    def add(one: FileDescriptor) -> None:
        for dependency in one.dependencies:
            add(dependency)
        declared = FileDescriptorProto()
        one.CopyToProto(declared)
        if one.name == file.name:
            change(declared)
        pool.Add(declared)

    add(file)
    return pool.FindFileByName(file.name)


def differences(file: FileDescriptor) -> list[str]:
    found = [what for message in messages_of(file) for what in message_differences(message)]
    found += [what for enum in enums_of(file) for what in enum_differences(enum)]
    return found + [what for service in file.services_by_name.values() for what in service_differences(service)]


EXT_PROC = next(file for file in FILES if file.name.endswith("external_processor.proto"))
BASE = next(file for file in FILES if file.name.endswith("core/v3/base.proto"))
MODES = next(file for file in FILES if file.name.endswith("processing_mode.proto"))


def declared_message(file: FileDescriptorProto, name: str) -> DescriptorProto:
    return next(message for message in file.message_type if message.name == name)


def declared_field(file: FileDescriptorProto, message: str, name: str) -> FieldDescriptorProto:
    return next(field for field in declared_message(file, message).field if field.name == name)


def set_field(message: str, field_name: str, /, **attributes: Any) -> Callable[[FileDescriptorProto], None]:
    def change(file: FileDescriptorProto) -> None:
        field = declared_field(file, message, field_name)
        for attribute, value in attributes.items():
            setattr(field, attribute, value)

    return change


def leave_oneof(file: FileDescriptorProto) -> None:
    declared_field(file, "BodyMutation", "body").ClearField("oneof_index")


def rename_oneof(file: FileDescriptorProto) -> None:
    declared_message(file, "BodyMutation").oneof_decl[0].name = "change"


def change_map_value(file: FileDescriptorProto) -> None:
    entry = declared_message(file, "Metadata").nested_type[0]
    entry.field[1].type_name = ".google.protobuf.Any"


def renumber_enum_value(file: FileDescriptorProto) -> None:
    declared_message(file, "ProcessingMode").enum_type[1].value[4].number = 9


def drop_enum_value(file: FileDescriptorProto) -> None:
    del declared_message(file, "ProcessingMode").enum_type[1].value[4]


def rename_message(file: FileDescriptorProto) -> None:
    declared_message(file, "HttpTrailers").name = "HTTPTrailers"
    for field in declared_message(file, "ProcessingRequest").field:
        if field.type_name.endswith("HttpTrailers"):
            field.type_name = ".envoy.service.ext_proc.v3.HTTPTrailers"


def stop_streaming(file: FileDescriptorProto) -> None:
    file.service[0].method[0].server_streaming = False


def rename_method(file: FileDescriptorProto) -> None:
    file.service[0].method[0].name = "Processing"


def change_input(file: FileDescriptorProto) -> None:
    file.service[0].method[0].input_type = ".envoy.service.ext_proc.v3.ProcessingResponse"


def rename_service(file: FileDescriptorProto) -> None:
    file.service[0].name = "ExternalProcessing"


STATUS = "envoy.service.ext_proc.v3.CommonResponse.status"
MUTATION = "envoy.service.ext_proc.v3.BodyMutation.body"
PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"


class TestMistakesAreFound:
    @pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.name))
    def test_any_wrong_number(self, file: FileDescriptor) -> None:
        """Every field of every message in turn gets a number that the message does not use."""
        for message in messages_of(file):
            for field in message.fields:
                free = max(other.number for other in message.fields) + 1

                def change(
                    declared: FileDescriptorProto, message: Descriptor = message, name: str = field.name, to: int = free
                ) -> None:
                    found: Any = declared
                    for part in message.full_name.removeprefix(f"{declared.package}.").split("."):
                        nested = found.message_type if found is declared else found.nested_type
                        found = next(inner for inner in nested if inner.name == part)
                    next(inner for inner in found.field if inner.name == name).number = to

                expected = f"{message.full_name}.{field.name}: number is {free}, Envoy has {field.number}"
                assert differences(mutated(file, change)) == [expected]

    @pytest.mark.parametrize(
        ("file", "change", "expected"),
        [
            (EXT_PROC, set_field("CommonResponse", "status", name="state"), "Envoy has no such field"),
            (EXT_PROC, set_field("ImmediateResponse", "body", type=9), "type is string, Envoy has bytes"),
            (EXT_PROC, set_field("ImmediateResponse", "details", label=3), "repeated is True, Envoy has False"),
            (
                EXT_PROC,
                set_field("BodyResponse", "response", type_name=".envoy.service.ext_proc.v3.HeaderMutation"),
                "message type is envoy.service.ext_proc.v3.HeaderMutation, Envoy has CommonResponse",
            ),
            (
                EXT_PROC,
                set_field(
                    "ProtocolConfiguration",
                    "request_body_mode",
                    type_name=".envoy.service.ext_proc.v3.CommonResponse.ResponseStatus",
                ),
                "enum type is envoy.service.ext_proc.v3.CommonResponse.ResponseStatus, "
                "Envoy has ProcessingModeBodySendMode",
            ),
            (EXT_PROC, leave_oneof, "oneof is None, Envoy has mutation"),
            (EXT_PROC, rename_oneof, "oneof is change, Envoy has mutation"),
            (BASE, change_map_value, "message type is google.protobuf.Any, Envoy has Struct"),
            (MODES, renumber_enum_value, "number is 9, Envoy has 4"),
            (MODES, drop_enum_value, "number is None, Envoy has 4"),
            (EXT_PROC, rename_message, "Envoy has no message envoy.service.ext_proc.v3.HTTPTrailers"),
            (EXT_PROC, stop_streaming, f"{PROCESS}: streaming is (True, False), not (True, True)"),
            (EXT_PROC, rename_method, f"Envoy has no method {PROCESS}ing"),
            (EXT_PROC, change_input, "takes envoy.service.ext_proc.v3.ProcessingResponse, not ProcessingRequest"),
            (EXT_PROC, rename_service, "Envoy has no service envoy.service.ext_proc.v3.ExternalProcessing"),
        ],
    )
    def test_other_mistakes(
        self, file: FileDescriptor, change: Callable[[FileDescriptorProto], None], expected: str
    ) -> None:
        assert differences(mutated(file, lambda _: None)) == []
        found = differences(mutated(file, change))
        assert any(what.endswith(expected) for what in found), found

    def test_wrong_bytes(self) -> None:
        """The round trips do not rest on the comparison of declarations."""

        def swap(file: FileDescriptorProto) -> None:
            declared_field(file, "HttpBody", "body").number = 7

        wrong = mutated(EXT_PROC, swap).message_types_by_name["HttpBody"]
        peer = peer_message(wrong)
        assert peer is not None
        written = fill_ours(GetMessageClass(wrong)(), filled(wrong)).SerializeToString()
        with pytest.raises(AssertionError, match="HttpBody got unknown fields"):
            plain(peer.parse(written))
