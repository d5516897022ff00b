"""JetStream's gRPC messages: its field numbers, in a proto package of our own.

The wire knows field numbers and the method's path, never the package, so JetStream's clients are understood and a
process that also imports `jetstream` meets no second definition of its names. Built from descriptors at import, so that
no generated file ties us to one release of protobuf.

Ours are the numbers from 101 on in a sample, which JetStream's clients skip.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICE = 'jetstream_proto.Orchestrator'  # the service's full name on the wire

_PACKAGE = 'rlax_stack.jetstream_wire'
_Field = descriptor_pb2.FieldDescriptorProto
_INT32, _STRING, _BOOL, _FLOAT = (
  _Field.TYPE_INT32,
  _Field.TYPE_STRING,
  _Field.TYPE_BOOL,
  _Field.TYPE_FLOAT,
)


def _message(
  name: str,
  fields: dict[str, tuple[int, Any]],
  *,
  repeated: tuple[str, ...] = (),
  oneofs: dict[str, tuple[str, ...]] | None = None,
  nested: tuple[Any, ...] = (),
) -> Any:
  """A message type; a field is (number, scalar type or the path of a message)."""
  made = descriptor_pb2.DescriptorProto(name=name, nested_type=nested)
  oneof_of = {}
  for index, (oneof, members) in enumerate((oneofs or {}).items()):
    made.oneof_decl.add(name=oneof)
    oneof_of |= dict.fromkeys(members, index)
  for field, (number, kind) in fields.items():
    label = _Field.LABEL_REPEATED if field in repeated else _Field.LABEL_OPTIONAL
    added = made.field.add(name=field, number=number, label=label)
    if isinstance(kind, str):
      added.type, added.type_name = _Field.TYPE_MESSAGE, f'.{_PACKAGE}.{kind}'
    else:
      added.type = kind
    if field in oneof_of:
      added.oneof_index = oneof_of[field]
  return made


_REQUEST = _message(
  'DecodeRequest',
  {
    'max_tokens': (4, _INT32),
    'text_content': (5, 'DecodeRequest.TextContent'),
    'token_content': (6, 'DecodeRequest.TokenContent'),
    'metadata': (7, 'DecodeRequest.Metadata'),
    'num_samples': (8, _INT32),
    'lora_adapter_id': (9, _STRING),
    'has_bos': (10, _BOOL),
  },
  oneofs={'content': ('text_content', 'token_content'), 'metadata_optional': ('metadata',)},
  nested=(
    _message('TextContent', {'text': (1, _STRING)}),
    _message('TokenContent', {'token_ids': (1, _INT32)}, repeated=('token_ids',)),
    _message('Metadata', {'start_time': (1, _FLOAT)}),
  ),
)
_SAMPLE = _message(
  'Sample',
  {
    'text': (1, _STRING),
    'token_ids': (2, _INT32),
    'log_probs': (101, _FLOAT),
    'raw_log_probs': (102, _FLOAT),
    'versions': (103, _INT32),
    'finish_reason': (104, _STRING),
  },
  repeated=('token_ids', 'log_probs', 'raw_log_probs', 'versions'),
)
_RESPONSE = _message(
  'DecodeResponse',
  {
    'initial_content': (2, 'DecodeResponse.InitialContent'),
    'stream_content': (3, 'DecodeResponse.StreamContent'),
  },
  oneofs={'content': ('initial_content', 'stream_content')},
  nested=(
    _message('InitialContent', {}),
    _message(
      'StreamContent',
      {'samples': (1, 'DecodeResponse.StreamContent.Sample')},
      repeated=('samples',),
      nested=(_SAMPLE,),
    ),
  ),
)

_pool = descriptor_pool.DescriptorPool()
_pool.Add(
  descriptor_pb2.FileDescriptorProto(
    name='rlax_stack/serving/jetstream_wire.proto',
    package=_PACKAGE,
    syntax='proto3',
    message_type=[
      _REQUEST,
      _RESPONSE,
      _message('HealthCheckRequest', {}),
      _message('HealthCheckResponse', {'is_live': (1, _BOOL)}),
    ],
  )
)


def _class(name: str) -> Any:
  return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f'{_PACKAGE}.{name}'))


DecodeRequest = _class('DecodeRequest')
DecodeResponse = _class('DecodeResponse')
StreamContent = _class('DecodeResponse.StreamContent')
Sample = _class('DecodeResponse.StreamContent.Sample')
HealthCheckRequest = _class('HealthCheckRequest')
HealthCheckResponse = _class('HealthCheckResponse')
