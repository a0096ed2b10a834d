"""Our protos against ``envoy_data_plane``, an independent implementation of Envoy's.

``*_differences`` compare declarations and return sentences, none if both sides agree.

``fill_ours`` and ``build_theirs`` make a message of a plain value and ``plain`` turns either back: messages are dicts
of the fields present, times are datetimes and timedeltas, wrappers are what they wrap. So "both understand the same" is
an equality of plain values.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import ModuleType
from typing import Any, cast

import betterproto2
from envoy_data_plane.message_pool import default_message_pool
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from pydantic import PydanticDeprecatedSince212

# Declared under a name of our own; see the comment beside it.
RENAMED = {"envoy.service.discovery.v3.DiscoveryRequest.ErrorDetail": "google.rpc.Status"}

_TIMES = {"google.protobuf.Timestamp", "google.protobuf.Duration"}
_WRAPPERS = {"google.protobuf.BoolValue", "google.protobuf.UInt32Value"}


# ---- finding the counterpart ----


def their_module(package: str) -> ModuleType:
    with warnings.catch_warnings():
        # Their generated classes use a form of pydantic's validators that pydantic ≥ 2.12 warns about.
        warnings.simplefilter("ignore", PydanticDeprecatedSince212)
        return importlib.import_module(f"envoy_data_plane.{package}")


def peer_message(descriptor: Descriptor) -> type[betterproto2.Message] | None:
    """Their class for the message, or None if Envoy has none of that full name."""
    name = RENAMED.get(descriptor.full_name, descriptor.full_name)
    their_module(_package_of(name))  # importing it registers its messages
    return default_message_pool.url_to_type.get(f"type.googleapis.com/{name}")


def peer_enum(descriptor: EnumDescriptor) -> type[betterproto2.Enum] | None:
    """Their class for the enum, which is named after all the messages around it, in another casing."""
    package = descriptor.file.package
    module = their_module(package)
    flat = descriptor.full_name.removeprefix(f"{package}.").replace(".", "").lower()
    return next((getattr(module, name) for name in module.__all__ if name.lower() == flat), None)


def _package_of(full_name: str) -> str:
    return ".".join(part for part in full_name.split(".") if part[0].islower())


def their_fields(peer: type[betterproto2.Message]) -> tuple[dict[str, Any], dict[str, Any]]:
    """By field name: what their class declares, and the Python type of the value (under "name.value" for a map's)."""
    metadata: Any = peer._betterproto  # type: ignore[arg-type]  # their annotation of it fits no class
    return metadata.meta_by_field_name, metadata.cls_by_field


# ---- declarations ----


def message_differences(descriptor: Descriptor) -> list[str]:
    peer = peer_message(descriptor)
    if peer is None:
        return [f"Envoy has no message {descriptor.full_name}"]
    return [
        f"{descriptor.full_name}.{field.name}: {what}"
        for field in descriptor.fields
        for what in _field_differences(field, peer)
    ]


def _field_differences(field: FieldDescriptor, peer: type[betterproto2.Message]) -> Iterator[str]:
    declared, types = their_fields(peer)
    meta = declared.get(field.name)
    if meta is None:
        yield "Envoy has no such field"
        return
    expected = {
        "number": meta.number,
        "type": meta.proto_type,
        "repeated": bool(meta.repeated),
        "presence": bool(meta.optional),
        "oneof": meta.group,
    }
    found = {
        "number": field.number,
        "type": "map" if _is_map(field) else _type_name(field),
        "repeated": field.is_repeated and not _is_map(field),
        "presence": field.has_presence,
        "oneof": field.containing_oneof.name if field.containing_oneof else None,
    }
    yield from (f"{key} is {found[key]}, Envoy has {value}" for key, value in expected.items() if found[key] != value)
    if found["type"] != meta.proto_type:
        return
    if not _is_map(field):
        yield from _type_differences(field, meta, types[field.name])
        return
    key, value = _map_fields(field)
    if _type_name(key) != meta.map_meta[0].proto_type:
        yield f"key type is {_type_name(key)}, Envoy has {meta.map_meta[0].proto_type}"
    if _type_name(value) != meta.map_meta[1].proto_type:
        yield f"value type is {_type_name(value)}, Envoy has {meta.map_meta[1].proto_type}"
    else:
        yield from _type_differences(value, meta.map_meta[1], types[f"{field.name}.value"])


def _type_differences(field: FieldDescriptor, meta: betterproto2.FieldMetadata, their_type: type) -> Iterator[str]:
    if field.message_type:
        their_type = meta.unwrap() if meta.unwrap else their_type
        if peer_message(field.message_type) is not their_type:
            yield f"message type is {field.message_type.full_name}, Envoy has {their_type.__name__}"
    elif field.enum_type and peer_enum(field.enum_type) is not their_type:
        yield f"enum type is {field.enum_type.full_name}, Envoy has {their_type.__name__}"


def enum_differences(descriptor: EnumDescriptor) -> list[str]:
    """Unlike messages, enums must be complete: a value Envoy sends must have a name here."""
    peer = peer_enum(descriptor)
    if peer is None:
        return [f"Envoy has no enum {descriptor.full_name}"]
    renamed = peer.betterproto_value_to_renamed_proto_names()
    theirs = {renamed.get(value.value, value.name): value.value for value in peer}
    ours = {value.name: value.number for value in descriptor.values}
    return [
        f"{descriptor.full_name}.{name}: number is {ours.get(name)}, Envoy has {theirs.get(name)}"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]


def service_differences(descriptor: ServiceDescriptor) -> list[str]:
    module = their_module(descriptor.file.package)
    base = getattr(module, f"{descriptor.name}Base", None)
    if base is None:
        return [f"Envoy has no service {descriptor.full_name}"]
    handlers = base().__mapping__()
    found = []
    for method in descriptor.methods:
        path = f"/{descriptor.full_name}/{method.name}"
        handler = handlers.get(path)
        if handler is None:
            found.append(f"Envoy has no method {path}")
            continue
        cardinality = handler.cardinality
        expected = (cardinality.client_streaming, cardinality.server_streaming)
        if (method.client_streaming, method.server_streaming) != expected:
            found.append(f"{path}: streaming is {(method.client_streaming, method.server_streaming)}, not {expected}")
        if peer_message(method.input_type) is not handler.request_type:
            found.append(f"{path}: takes {method.input_type.full_name}, not {handler.request_type.__name__}")
        if peer_message(method.output_type) is not handler.reply_type:
            found.append(f"{path}: returns {method.output_type.full_name}, not {handler.reply_type.__name__}")
    return found


# ---- values ----


def filled(descriptor: Descriptor, choice: int = 0) -> dict[str, Any]:
    """A plain value with every field set to something that is not its default; of each oneof, member ``choice``."""
    return _filled(descriptor, choice, iter(range(1, 100_000)))


def _filled(descriptor: Descriptor, choice: int, numbers: Iterator[int]) -> dict[str, Any]:
    chosen = {oneof.fields[choice % len(oneof.fields)].name for oneof in descriptor.oneofs}
    return {
        field.name: _filled_field(field, choice, numbers)
        for field in descriptor.fields
        if field.containing_oneof is None or field.name in chosen
    }


def _filled_field(field: FieldDescriptor, choice: int, numbers: Iterator[int]) -> Any:
    if _is_map(field):
        _, value = _map_fields(field)
        return {f"key-{next(numbers)}": _filled_one(value, choice, numbers) for _ in range(2)}
    if field.is_repeated:
        return [_filled_one(field, choice, numbers) for _ in range(2)]
    return _filled_one(field, choice, numbers)


def _filled_one(field: FieldDescriptor, choice: int, numbers: Iterator[int]) -> Any:
    number = next(numbers)
    if field.enum_type:
        values = [value.number for value in field.enum_type.values if value.number]
        return values[(number + choice) % len(values)]
    kind = field.message_type.full_name if field.message_type else _type_name(field)
    match kind:
        case "string":
            return f"ü-{number}"
        case "bytes":
            return b"\xff\x00" + str(number).encode()
        case "bool" | "google.protobuf.BoolValue":
            return True
        case "double":
            return number + 0.25
        case "uint32" | "google.protobuf.UInt32Value":
            return 2**32 - number
        case "uint64":
            return 2**64 - number
        case "int32":
            return -number
        case "google.protobuf.Timestamp":
            return datetime(2024, 2, 29, tzinfo=UTC) + timedelta(microseconds=number)
        case "google.protobuf.Duration":
            return timedelta(seconds=number, microseconds=number)
        case "google.protobuf.Struct":
            text = {"string_value": f"text-{number}"}
            return {"fields": {"a": text, "b": {"struct_value": {"fields": {"n": {"number_value": number + 0.5}}}}}}
        case _ if field.message_type:
            return _filled(field.message_type, choice, numbers)
    raise NotImplementedError(f"no filling for {kind}")


def fill_ours(message: Message, value: dict[str, Any]) -> Message:
    """Set the fields of ``value``; returns the message."""
    for name, item in value.items():
        field = cast(FieldDescriptor, message.DESCRIPTOR.fields_by_name[name])
        target = getattr(message, name)
        if _is_map(field):
            of_messages = _map_fields(field)[1].message_type
            for key, entry in item.items():
                if of_messages:
                    fill_ours(target[key], entry)
                else:
                    target[key] = entry
        elif field.is_repeated:
            for entry in item:
                if field.message_type:
                    fill_ours(target.add(), entry)
                else:
                    target.append(entry)
        elif field.message_type is None:
            setattr(message, name, item)
        elif field.message_type.full_name == "google.protobuf.Timestamp":
            target.FromDatetime(item)
        elif field.message_type.full_name == "google.protobuf.Duration":
            target.FromTimedelta(item)
        elif field.message_type.full_name in _WRAPPERS:
            target.value = item
        else:
            target.SetInParent()
            fill_ours(target, item)
    return message


def build_theirs(cls: type[betterproto2.Message], value: dict[str, Any]) -> betterproto2.Message:
    made: dict[str, Any] = {}
    declared, types = their_fields(cls)
    for name, item in value.items():
        meta, their_type = declared[name], types[name]
        if meta.map_meta:
            entry_type = types[f"{name}.value"]
            made[name] = {key: _their_value(entry_type, entry) for key, entry in item.items()}
        elif meta.repeated:
            made[name] = [_their_value(their_type, entry) for entry in item]
        else:
            made[name] = _their_value(their_type, item)
    return cls(**made)


def _their_value(their_type: type, item: Any) -> Any:
    if isinstance(item, dict):
        return build_theirs(their_type, item)
    return their_type(item) if issubclass(their_type, betterproto2.Enum) else item


def plain(message: Message | betterproto2.Message) -> dict[str, Any]:
    """Raises AssertionError if the message, or one inside it, holds bytes that its declaration does not cover."""
    return _plain_ours(message) if isinstance(message, Message) else _plain_theirs(message)


def _plain_ours(message: Message) -> dict[str, Any]:
    unknown = [field.field_number for field in cast(Any, UnknownFieldSet(message))]
    assert not unknown, f"{message.DESCRIPTOR.full_name} got unknown fields {unknown}"
    value: dict[str, Any] = {}
    item: Any
    for field, item in message.ListFields():
        if _is_map(field):
            value[field.name] = {key: _plain_item(entry) for key, entry in item.items()}
        elif field.is_repeated:
            value[field.name] = [_plain_item(entry) for entry in item]
        else:
            value[field.name] = _plain_item(item)
    return value


def _plain_item(item: Any) -> Any:
    if not isinstance(item, Message):
        return item
    known: Any = item
    match item.DESCRIPTOR.full_name:
        case "google.protobuf.Timestamp":
            return known.ToDatetime(tzinfo=UTC)
        case "google.protobuf.Duration":
            return known.ToTimedelta()
        case name if name in _WRAPPERS:
            return known.value
    return _plain_ours(item)


def _plain_theirs(message: betterproto2.Message) -> dict[str, Any]:
    assert not message._unknown_fields, f"{type(message).__name__} got unknown fields {message._unknown_fields!r}"
    value: dict[str, Any] = {}
    for name, meta in their_fields(type(message))[0].items():
        item = getattr(message, name)
        if item is None or (not meta.optional and not item):
            continue
        if isinstance(item, dict):
            value[name] = {key: _plain_their_item(entry) for key, entry in item.items()}
        elif isinstance(item, list):
            value[name] = [_plain_their_item(entry) for entry in item]
        else:
            value[name] = _plain_their_item(item)
    return value


def _plain_their_item(item: Any) -> Any:
    if isinstance(item, betterproto2.Message):
        return _plain_theirs(item)
    return int(item) if isinstance(item, betterproto2.Enum) else item


def _is_map(field: FieldDescriptor) -> bool:
    return bool(field.message_type and field.message_type.GetOptions().map_entry)


def _map_fields(field: FieldDescriptor) -> tuple[FieldDescriptor, FieldDescriptor]:
    entry = cast(Descriptor, field.message_type)
    return entry.fields_by_name["key"], entry.fields_by_name["value"]


def _type_name(field: FieldDescriptor) -> str:
    return FieldDescriptorProto.Type.Name(cast(Any, field.type)).removeprefix("TYPE_").lower()
