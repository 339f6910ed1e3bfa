from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as modes
from envoy_data_plane.envoy.service.ext_proc import v3 as ext_proc
from envoy_data_plane.envoy.type import v3 as types
from google.protobuf.descriptor import FieldDescriptor

from sidecar.extproc.pb.envoy.config.core.v3 import base_pb2
from sidecar.extproc.pb.envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from sidecar.extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2
from sidecar.extproc.pb.envoy.type.v3 import http_status_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.descriptor import Descriptor, EnumDescriptor, FileDescriptor

ROOT = Path(__file__).resolve().parents[3]
PAIRS: list[tuple[FileDescriptor, Any]] = [
    (base_pb2.DESCRIPTOR, core),
    (processing_mode_pb2.DESCRIPTOR, modes),
    (external_processor_pb2.DESCRIPTOR, ext_proc),
    (http_status_pb2.DESCRIPTOR, types),
]
TYPE_NAMES = {
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_BYTES: "bytes",
    FieldDescriptor.TYPE_ENUM: "enum",
    FieldDescriptor.TYPE_MESSAGE: "message",
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_UINT32: "uint32",
}


def name_of(value: Any) -> str:
    return str(getattr(value, "name", ""))


def all_messages() -> Iterator[tuple[Descriptor, Any]]:
    for file, module in PAIRS:
        for message in file.message_types_by_name.values():
            yield message, module


def all_enums() -> Iterator[tuple[EnumDescriptor, Any]]:
    for file, module in PAIRS:
        for enum in file.enum_types_by_name.values():
            yield enum, getattr(module, enum.name)
        for message in file.message_types_by_name.values():
            for enum in message.enum_types_by_name.values():
                yield enum, getattr(module, message.name + enum.name)


@pytest.mark.parametrize(("message", "module"), list(all_messages()), ids=name_of)
def test_fields_are_envoys(message: Descriptor, module: Any) -> None:
    """Every field of ours exists in Envoy's message with the same number, type, label, oneof and target."""
    theirs = {
        entry.name: (entry.metadata["betterproto"], str(entry.type))
        for entry in dataclasses.fields(getattr(module, message.name))
    }
    for ours in message.fields:
        meta, annotation = theirs[ours.name]
        assert meta.number == ours.number, ours.full_name
        target = ours.message_type
        if target is not None and target.GetOptions().map_entry:
            assert meta.proto_type == "map", ours.full_name
            for side, entry in zip(meta.map_meta, target.fields, strict=True):
                assert (side.number, side.proto_type) == (entry.number, TYPE_NAMES[entry.type])
            value = target.fields_by_name["value"].message_type
            assert value is not None
            assert value.name in annotation
            continue
        assert meta.proto_type == TYPE_NAMES[ours.type], ours.full_name
        assert meta.repeated == ours.is_repeated, ours.full_name
        assert meta.group == (ours.containing_oneof.name if ours.containing_oneof else None), ours.full_name
        if target is not None and meta.unwrap is None:
            assert target.name in annotation, ours.full_name
        elif target is not None:
            assert meta.unwrap().__name__ == target.name, ours.full_name
        if ours.enum_type is not None:
            assert ours.enum_type.name in annotation, ours.full_name


@pytest.mark.parametrize(("enum", "theirs"), list(all_enums()), ids=name_of)
def test_enum_values_are_envoys(enum: EnumDescriptor, theirs: Any) -> None:
    """Every enum of ours has exactly Envoy's names and numbers."""
    assert {value.name: value.number for value in enum.values} == {
        value.name: value.value for value in theirs
    }


def test_every_field_of_a_request_is_defined() -> None:
    """Nothing Envoy can say in a ProcessingRequest is unknown to us."""
    ours = external_processor_pb2.ProcessingRequest.DESCRIPTOR.fields_by_name
    assert set(ours) == {entry.name for entry in dataclasses.fields(ext_proc.ProcessingRequest)}


def test_wire_bytes_agree() -> None:
    """A reply of every kind that our modules write reads the same in Envoy's schema."""
    reply = external_processor_pb2.ProcessingResponse()
    chunk = reply.streamed_immediate_response.body_response
    chunk.body, chunk.end_of_stream = b"data: x", True
    reply.override_message_timeout.FromSeconds(3)
    reply.mode_override.request_body_mode = processing_mode_pb2.ProcessingMode.FULL_DUPLEX_STREAMED
    theirs = ext_proc.ProcessingResponse.parse(reply.SerializeToString())
    assert theirs.streamed_immediate_response is not None
    assert theirs.streamed_immediate_response.body_response == ext_proc.StreamedBodyResponse(
        body=b"data: x", end_of_stream=True
    )
    assert theirs.override_message_timeout is not None
    assert theirs.override_message_timeout.total_seconds() == 3
    assert theirs.mode_override is not None
    assert theirs.mode_override.request_body_mode.name == "FULL_DUPLEX_STREAMED"


def test_committed_modules_are_compiled_from_the_definitions(tmp_path: Path) -> None:
    """Compiling proto/ again gives the committed package, file by file."""
    spec = importlib.util.spec_from_file_location("proto_compile", ROOT / "proto" / "compile.py")
    assert spec is not None
    assert spec.loader is not None
    compiler = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compiler)
    written = compiler.compile_protos(tmp_path)
    committed = ROOT / "sidecar" / "extproc" / "pb"
    assert written == sorted(
        path.relative_to(committed) for path in committed.rglob("*.py*") if path.suffix in (".py", ".pyi")
    )
    for path in written:
        assert (tmp_path / path).read_text() == (committed / path).read_text(), f"{path}: run make proto"


def test_no_top_level_envoy_package_is_imported() -> None:
    """The generated modules work beside a distribution that installs its own package `envoy`."""
    probe = (
        "import sys; import sidecar.extproc.pb.envoy.service.ext_proc.v3.external_processor_pb2; "
        "sys.exit('envoy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", probe], cwd=ROOT, check=False).returncode == 0
