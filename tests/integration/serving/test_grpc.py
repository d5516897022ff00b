"""JetStream's wire, by a client that knows its path and its field numbers only."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import socket
import time

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from rlax_stack.errors import ConfigError
from rlax_stack.models.load import load_model
from rlax_stack.serving import jetstream_messages as messages
from rlax_stack.serving.grpc_server import make_grpc_server

TOKEN = 'a-token-of-enough-characters'


@pytest.fixture(scope='module')
def grpc_server(serve_config, replaced, run_endpoint):
  def without_stops(endpoint):
    """The wire cannot ask for it, and some tests need samples that take long."""
    defaults = dataclasses.replace(endpoint.served.defaults, stop_token_ids=())
    endpoint.served = dataclasses.replace(endpoint.served, defaults=defaults)

  with socket.create_server(('127.0.0.1', 0)) as free:
    port = free.getsockname()[1]
  config = replaced(serve_config(), grpc_port=port)
  with run_endpoint(config, without_stops, token=TOKEN) as found:
    found.grpc_address, found.section = f'127.0.0.1:{port}', config.serve
    yield found


@contextlib.contextmanager
def stubs(server, token=TOKEN, options=()):
  """The methods of a plain channel: `decode(request, timeout)` and `health()`."""
  metadata = (('authorization', f'Bearer {token}'),) if token else ()
  with grpc.insecure_channel(server.grpc_address, options) as channel:
    decode = channel.unary_stream(
      '/jetstream_proto.Orchestrator/Decode',
      request_serializer=lambda message: message.SerializeToString(),
      response_deserializer=messages.DecodeResponse.FromString,
    )
    health = channel.unary_unary('/jetstream_proto.Orchestrator/HealthCheck')
    yield (
      lambda request, timeout=30: decode(request, timeout=timeout, metadata=metadata),
      lambda: messages.HealthCheckResponse.FromString(health(b'', timeout=30)),
    )


def merged(responses):
  """What each sample got in all: text, token ids, log-probs, versions and the reason it ended."""
  samples = {}
  for response in responses:
    for index, sample in enumerate(response.stream_content.samples):
      at = samples.setdefault(index, ['', [], [], [], ''])
      at[0] += sample.text
      at[1] += sample.token_ids
      at[2] += sample.log_probs
      at[3] += sample.versions
      at[4] += sample.finish_reason
  return [samples[index] for index in sorted(samples)]


def tokens(*ids, **fields):
  return messages.DecodeRequest(token_content={'token_ids': ids}, **fields)


def test_tokens_in_tokens_out(grpc_server):
  with stubs(grpc_server) as (decode, health):
    assert health().is_live
    ((text, ids, log_probs, versions, reason),) = merged(decode(tokens(3, 4, max_tokens=40)))
  assert text == '' and len(ids) == len(log_probs) == 40
  assert reason == 'length' and versions == [0] * 40
  assert max(log_probs) < 0


def test_texts_and_samples(grpc_server, long_model):
  tokenizer = load_model(long_model).tokenizer
  request = messages.DecodeRequest(text_content={'text': 'the sky'}, max_tokens=30, num_samples=3)
  with stubs(grpc_server) as (decode, _):
    samples = merged(decode(request))
  assert len(samples) == 3 and len({sample[0] for sample in samples}) > 1
  for text, ids, *_ in samples:
    assert text == tokenizer.decode(ids)


def test_the_wire_is_jetstreams(grpc_server):
  """A message of JetStream's own definition, of its 0.2.2, is understood and answers are."""
  field = descriptor_pb2.FieldDescriptorProto
  content = descriptor_pb2.DescriptorProto(name='C')
  content.field.add(name='ids', number=1, type=field.TYPE_INT32, label=field.LABEL_REPEATED)
  old = descriptor_pb2.DescriptorProto(name='Old', nested_type=[content])
  old.field.add(name='session', number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
  old.field.add(name='priority', number=3, type=field.TYPE_INT32, label=field.LABEL_OPTIONAL)
  old.field.add(name='most', number=4, type=field.TYPE_INT32, label=field.LABEL_OPTIONAL)
  old.field.add(
    name='tokens',
    number=6,
    type=field.TYPE_MESSAGE,
    type_name='.old.Old.C',
    label=field.LABEL_OPTIONAL,
  )
  pool = descriptor_pool.DescriptorPool()
  pool.Add(
    descriptor_pb2.FileDescriptorProto(
      name='old.proto', package='old', syntax='proto3', message_type=[old]
    )
  )
  kind = message_factory.GetMessageClass(pool.FindMessageTypeByName('old.Old'))
  request = kind(session='', priority=1, most=5, tokens={'ids': [3, 4]})
  with stubs(grpc_server) as (decode, _):
    ((_, ids, *_),) = merged(decode(request))
  assert len(ids) == 5
  # Byte for byte: 3 = stream_content, 1 = samples, 1 = text, 2 = token ids.
  answer = messages.DecodeResponse(
    stream_content={'samples': [messages.Sample(text='a', token_ids=[7])]}
  )
  assert answer.SerializeToString() == b'\x1a\x08\x0a\x06\x0a\x01a\x12\x01\x07'
  assert messages.HealthCheckResponse(is_live=True).SerializeToString() == b'\x08\x01'
  want = {'max_tokens': 4, 'text_content': 5, 'token_content': 6, 'metadata': 7}
  want |= {'num_samples': 8, 'lora_adapter_id': 9, 'has_bos': 10}
  assert {f.name: f.number for f in messages.DecodeRequest.DESCRIPTOR.fields} == want


def refused(server, reason):
  registry = server.endpoint.metrics.registry
  return registry.get_sample_value('rlax_refused_total', {'reason': reason}) or 0.0


@pytest.mark.parametrize(
  ('request_fields', 'says'),
  [
    ({'token_content': {'token_ids': [3] * 33}}, 'has 33 tokens, but at most 32'),
    ({'token_content': {'token_ids': []}}, 'P >= 1'),
    ({'token_content': {'token_ids': [99]}}, 'got 99..99'),
    ({'token_content': {'token_ids': [3]}, 'max_tokens': 8001}, 'max_tokens must be in'),
    ({'token_content': {'token_ids': [3]}, 'max_tokens': -1}, 'max_tokens must be in'),
    ({'token_content': {'token_ids': [3]}, 'num_samples': 11}, '11 samples in one request'),
    ({'token_content': {'token_ids': [3]}, 'lora_adapter_id': 'x'}, 'no LoRA adapter'),
    ({}, 'P >= 1'),
  ],
)
def test_what_cannot_be_served_is_an_invalid_argument(grpc_server, request_fields, says):
  with stubs(grpc_server) as (decode, health):
    with pytest.raises(grpc.RpcError) as caught:
      list(decode(messages.DecodeRequest(**request_fields)))
    assert (
      caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT and says in caught.value.details()
    )
    assert health().is_live


@pytest.mark.parametrize('token', [None, 'wrong', TOKEN + 'x'])
def test_a_token_is_asked_for(grpc_server, token):
  before = refused(grpc_server, 'invalid_api_key')
  with stubs(grpc_server, token) as (decode, _), pytest.raises(grpc.RpcError) as caught:
    list(decode(tokens(3)))
  assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
  assert refused(grpc_server, 'invalid_api_key') == before + 1


def idle(server):
  deadline = time.monotonic() + 20
  while server.bridge.in_flight:
    assert time.monotonic() < deadline
    time.sleep(0.01)


def endless(**fields):
  """A prompt whose samples take long."""
  return tokens(3, 4, 5, max_tokens=8000, **fields)


def test_deadlines_and_clients_that_leave_free_their_slots(grpc_server):
  idle(grpc_server)
  gone = refused(grpc_server, 'client_gone')
  with stubs(grpc_server) as (decode, _):
    with pytest.raises(grpc.RpcError) as caught:
      list(decode(endless(num_samples=8), timeout=0.05))
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    idle(grpc_server)
    call = decode(endless(num_samples=8))
    next(call)
    call.cancel()
    idle(grpc_server)
  deadline = time.monotonic() + 20
  while refused(grpc_server, 'client_gone') < gone + 1:
    assert time.monotonic() < deadline
    time.sleep(0.01)


def test_a_reader_that_stops_reading_is_given_up(grpc_server):
  idle(grpc_server)
  before = refused(grpc_server, 'slow')
  little = (('grpc.http2.lookahead_bytes', 1024), ('grpc.http2.bdp_probe', 0))
  with stubs(grpc_server, options=little) as (decode, health):
    call = decode(endless(num_samples=4))
    next(call)
    idle(grpc_server)
    assert refused(grpc_server, 'slow') == before + 1
    assert health().is_live
    with pytest.raises(grpc.RpcError) as caught:
      list(call)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


def test_overload_is_resource_exhausted_and_a_large_message_is_refused(grpc_server):
  idle(grpc_server)
  codes = []

  def one(_):
    try:
      return len(list(decode(tokens(3, max_tokens=300, num_samples=5))))
    except grpc.RpcError as error:
      codes.append(error.code())
      return 0

  with stubs(grpc_server) as (decode, health):
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
      served = list(pool.map(one, range(20)))
    assert codes and set(codes) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert sum(map(bool, served)) == 20 - len(codes) >= 2
    with pytest.raises(grpc.RpcError) as caught:
      list(decode(messages.DecodeRequest(text_content={'text': 'x' * 5000})))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert health().is_live


def test_a_taken_port_is_told(grpc_server):
  endpoint, section = grpc_server.endpoint, grpc_server.section

  async def make():
    make_grpc_server(
      endpoint.served, endpoint.bridge, endpoint.metrics, section=section, token=None
    )

  with pytest.raises(ConfigError, match=f'grpc_port={section.grpc_port}. Choose another'):
    asyncio.run(make())
