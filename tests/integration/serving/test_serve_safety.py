"""Clients that are hasty, greedy, slow or hostile: each gets a clear answer, is counted, and the server stays up.

What guarded_protocol does for connections and HttpApi for requests, over real sockets.
"""

import concurrent.futures
import contextlib
import json
import socket
import time

import httpx2 as httpx
import jax
import numpy as np
import openai
import pytest

from rlax_stack.errors import ConfigError, FleetError
from rlax_stack.models.load import load_model
from rlax_stack.serving.endpoint import check_token

LONG = {'model': 'toy', 'prompt': 'sky', 'max_tokens': 8000, 'stop_token_ids': [], 'seed': 1}
SHORT = {**LONG, 'max_tokens': 8}
TOKEN = 'a-token-of-enough-characters'


@pytest.fixture(scope='module')
def http(server):
  with httpx.Client(base_url=server.url, timeout=30) as client:
    yield client


def refused(server, reason):
  value = server.endpoint.metrics.registry.get_sample_value(
    'rlax_refused_total', {'reason': reason}
  )
  return value or 0.0


@contextlib.contextmanager
def counted(server, reason, least=1):
  """One more refusal of this reason, and a server that answers afterwards."""
  before = refused(server, reason)
  yield
  wait_for(lambda: refused(server, reason) >= before + least)
  answer = httpx.post(f'{server.url}/completions', json=SHORT, timeout=30)
  assert answer.status_code == 200 and len(answer.json()['choices'][0]['token_ids']) == 8


def wait_for(holds, timeout_s=20.0):
  deadline = time.monotonic() + timeout_s
  while not holds():
    assert time.monotonic() < deadline, 'it did not come to hold'
    time.sleep(0.01)


def error_of(answer, status):
  assert answer.status_code == status, answer.text
  error = answer.json()['error']
  assert error.keys() == {'message', 'type', 'param', 'code'}
  return error


@contextlib.contextmanager
def raw(server, data, *, receive_buffer=None, timeout_s=5.0):
  """A connection that has sent `data`."""
  with socket.socket() as client:
    if receive_buffer:
      client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.connect(('127.0.0.1', server.port))
    client.sendall(data)
    client.settimeout(timeout_s)
    yield client


def head(length):
  lines = ('POST /v1/completions HTTP/1.1', 'Host: x', f'Content-Length: {length}', '', '')
  return '\r\n'.join(lines).encode()


@pytest.mark.parametrize(
  ('changes', 'param', 'says'),
  [
    ({'prompt': 'sky ' * 40}, 'prompt', 'has 40 tokens, but at most 32 are allowed'),
    ({'prompt': ''}, 'prompt', 'at least one token'),
    ({'prompt': [3, 99]}, None, 'got 3..99'),
    ({'prompt': [3, -1]}, 'prompt', 'a text, token ids'),
    ({'prompt': None}, 'prompt', 'a text, token ids'),
    ({'max_tokens': 8001}, 'max_tokens', 'from 1 to 8000, got 8001'),
    ({'max_tokens': 10**400}, 'max_tokens', 'from 1 to 8000'),
    ({'temperature': -1}, 'temperature', 'at least 0, got -1'),
    ({'temperature': '1'}, 'temperature', 'must be a number'),
    ({'top_p': 0}, 'top_p', 'from 1e-09 to 1'),
    ({'n': 11}, None, '11 samples in one request, but at most 10'),
    ({'n': True}, 'n', 'must be an integer'),
    ({'stop': ['']}, 'stop', 'none of them empty'),
    ({'stop': ['x'] * 17}, 'stop', 'at most 16 texts'),
    ({'stop': 'x' * 257}, 'stop', 'at most 256 characters'),
    ({'stop_token_ids': list(range(9))}, None, '9 stop_token_ids'),
    ({'logprobs': 30}, 'logprobs', 'from 0 to 20'),
    ({'logit_bias': {'x': 1}}, 'logit_bias', 'must map token ids'),
    ({'presence_penalty': 3}, 'presence_penalty', 'from -2 to 2'),
    ({'max_tokens': 0}, 'max_tokens', 'needs echo or prompt_logprobs'),
    ({'echo': True, 'stream': True}, 'stream', 'echo and prompt_logprobs do not go with stream'),
    ({'prompt_logprobs': 21}, 'prompt_logprobs', 'from 0 to 20'),
    ({'suffix': 'x'}, 'suffix', 'suffix is not supported'),
    ({'prompt': [3, 99], 'echo': True, 'max_tokens': 0}, None, 'got 3..99'),
    (
      {'prompt': ['sky'] * 6, 'prompt_logprobs': 0},
      None,
      '12 samples and scored prompts in one request, but at most 10',
    ),
    ({'temprature': 1}, 'temprature', "unknown field 'temprature'. Did you mean temperature?"),
    ({'stream': 1}, 'stream', 'must be true or false'),
  ],
)
def test_a_field_that_cannot_be_honoured_is_named(http, changes, param, says):
  error = error_of(http.post('/completions', json={**SHORT, **changes}), 400)
  assert error['param'] == param and says in error['message']
  assert error['type'] == 'invalid_request_error'


def test_values_that_ask_for_nothing_are_taken(http):
  nothing = {'response_format': {'type': 'text'}, 'best_of': 1, 'echo': False, 'user': 'x'}
  assert http.post('/completions', json={**SHORT, **nothing}).status_code == 200


def test_the_openai_client_raises_its_own_errors(server):
  with openai.OpenAI(base_url=server.url, api_key='unused', max_retries=0) as client:
    with pytest.raises(openai.BadRequestError, match='has 33 tokens') as caught:
      client.completions.create(model='toy', prompt='sky ' * 33)
    assert caught.value.code == 'context_length_exceeded'
    with pytest.raises(openai.NotFoundError, match="'toy' is") as caught:
      client.completions.create(model='gpt', prompt='sky')
    assert caught.value.code == 'model_not_found'


@pytest.mark.parametrize('body', [b'', b'{', b'[]', b'{"n": NaN}', b'[' * 4000, b'\xff'])
def test_bodies_that_are_no_object(http, body):
  assert 'the body' in error_of(http.post('/completions', content=body), 400)['message']


def test_other_paths_and_methods(http):
  assert 'no GET' in error_of(http.get('/nothing'), 404)['message']
  assert 'no GET' in error_of(http.get('/completions'), 405)['message']


def test_ten_times_more_than_fits_is_refused_at_once_and_the_rest_is_served(server):
  """100 clients at 10 places: memory is bounded by the places, refusals say when to come back."""
  most = 0

  def one(i):
    nonlocal most
    body = {**LONG, 'max_tokens': 1000, 'seed': i}
    answer = httpx.post(f'{server.url}/completions', json=body, timeout=60)
    most = max(most, server.bridge.in_flight)
    return answer

  with counted(server, 'overloaded', least=50):
    with concurrent.futures.ThreadPoolExecutor(100) as pool:
      answers = list(pool.map(one, range(100)))
  served = [a for a in answers if a.status_code == 200]
  assert 10 <= len(served) <= 50 and most <= 10
  for answer in served:
    assert len(answer.json()['choices'][0]['token_ids']) == 1000
  for answer in answers:
    if answer.status_code != 200:
      assert error_of(answer, 429)['type'] == 'rate_limit_error'
      assert 1 <= int(answer.headers['retry-after']) <= 60
  wait_for(lambda: server.bridge.in_flight == 0)


def test_a_client_that_comes_back_when_told_is_served(server):
  with openai.OpenAI(base_url=server.url, api_key='unused', max_retries=20) as client:
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
      jobs = [
        pool.submit(client.completions.create, model='toy', prompt='sky', max_tokens=800, seed=i)
        for i in range(12)
      ]
      assert all(job.result().choices for job in jobs)


@pytest.mark.parametrize('stream', [False, True])
def test_a_client_that_leaves_frees_its_slot(server, stream):
  body = json.dumps({**LONG, 'stream': stream, 'n': 2}).encode()
  with counted(server, 'client_gone'):
    with raw(server, head(len(body)) + body) as client:
      wait_for(lambda: server.bridge.in_flight == 2)
      if stream:
        assert client.recv(100).startswith(b'HTTP/1.1 200')
    start = time.monotonic()
    wait_for(lambda: server.bridge.in_flight == 0)
    assert time.monotonic() - start < 2.0  # the whole would take longer


def test_a_deadline_is_kept_and_frees_the_slot(server, http):
  body = {**LONG, 'timeout_s': 0.2}
  with counted(server, 'deadline_exceeded', least=2):
    error = error_of(http.post('/completions', json=body), 504)
    assert error['code'] == 'deadline_exceeded' and 'deadline' in error['message']
    wait_for(lambda: server.bridge.in_flight == 0)
    events = http.post('/completions', json={**body, 'stream': True}).text.strip().split('\n\n')
    assert json.loads(events[0].removeprefix('data: '))['choices'][0]['token_ids']
    assert json.loads(events[-1].removeprefix('data: '))['error']['code'] == 'deadline_exceeded'
  wait_for(lambda: server.bridge.in_flight == 0)


def test_a_body_that_is_too_large(server, http):
  with counted(server, 'too_large', least=3):
    large = {**SHORT, 'user': 'x' * 5000}
    assert '4096 bytes' in error_of(http.post('/completions', json=large), 413)['message']
    endless = (b'x' * 1000 for _ in range(10**9))
    with contextlib.suppress(httpx.WriteError, httpx.ReadError):  # it may see the door close first
      error_of(http.post('/completions', content=endless), 413)
    with raw(server, head(10**12)) as client:
      assert client.recv(100).startswith(b'HTTP/1.1 413')


def test_a_body_that_drips_is_given_up(server):
  with counted(server, 'slow'), raw(server, head(100), timeout_s=0.05) as client:
    start, answer = time.monotonic(), b''
    while not answer:
      client.sendall(b' ')
      with contextlib.suppress(TimeoutError):
        answer = client.recv(1000)
    assert answer.startswith(b'HTTP/1.1 408') and time.monotonic() - start < 3


@pytest.mark.parametrize('start', [b'', b'POST /v1/completions HTTP/1.1\r\n'])
def test_a_head_that_drips_or_never_comes_is_given_up(server, start):
  with counted(server, 'slow'), raw(server, start, timeout_s=0.05) as client:
    begin = time.monotonic()
    with contextlib.suppress(ConnectionError):
      while time.monotonic() - begin < 3:
        if start:
          client.sendall(b'x')
        with contextlib.suppress(TimeoutError):
          assert client.recv(1000) == b''
          break
    assert time.monotonic() - begin < 3


def test_a_reader_that_stops_reading_is_given_up(server):
  body = json.dumps({**LONG, 'n': 4, 'stream': True, 'logprobs': 0}).encode()
  with counted(server, 'slow'):
    with raw(server, head(len(body)) + body, receive_buffer=4096):
      wait_for(lambda: server.bridge.in_flight == 4)
      wait_for(lambda: server.bridge.in_flight == 0)


def test_what_is_no_http_is_refused(server):
  with counted(server, 'malformed'), raw(server, b'\x16\x03\x01 hello\r\n\r\n') as client:
    assert client.recv(100).startswith(b'HTTP/1.1 400')


def test_connections_are_bounded_and_a_token_is_asked_for(serve_config, replaced, run_endpoint):
  config = replaced(serve_config(), max_connections=3)
  with run_endpoint(config, token=TOKEN) as server, contextlib.ExitStack() as stack:
    for given in (None, 'Bearer wrong', f'Basic {TOKEN}', f'Bearer {TOKEN}x', 'Bearer \u00e9'):
      headers = {} if given is None else {'authorization': given.encode()}
      for path in ('/v1/models', '/metrics', '/v1/completions'):
        method = 'POST' if path.endswith('s') and 'comp' in path else 'GET'
        url = f'http://127.0.0.1:{server.port}{path}'
        answer = httpx.request(method, url, headers=headers)
        assert error_of(answer, 401)['code'] == 'invalid_api_key'
        assert answer.headers['www-authenticate'] == 'Bearer'
    assert refused(server, 'invalid_api_key') == 15
    assert httpx.get(f'http://127.0.0.1:{server.port}/health').json()['status'] == 'ok'
    with openai.OpenAI(base_url=server.url, api_key=TOKEN) as client:
      assert client.models.list().data[0].id == 'toy'
    for _ in range(3):
      stack.enter_context(socket.create_connection(('127.0.0.1', server.port)))
    wait_for(lambda: _is_full(server))


def _is_full(server):
  try:
    answer = httpx.get(f'http://127.0.0.1:{server.port}/health')
  except httpx.TransportError:
    return False
  return answer.status_code == 503 and answer.json()['error']['code'] == 'connections'


def test_other_addresses_need_a_token():
  for host in ('127.0.0.1', '::1', 'localhost'):
    check_token(host, None, 'VARIABLE')
  for host in ('0.0.0.0', '::', '192.0.2.1'):
    with pytest.raises(ConfigError, match=f'host={host} can be reached .* variable VARIABLE'):
      check_token(host, None, 'VARIABLE')
    check_token(host, TOKEN, 'VARIABLE')
  with pytest.raises(ConfigError, match='has 5 characters. Use 16 or more'):
    check_token('127.0.0.1', 'short', 'VARIABLE')
  with pytest.raises(ConfigError, match='is no address of this machine'):
    check_token('no.such.host.invalid', None, 'VARIABLE')


def test_requests_on_their_way_are_answered_when_the_server_is_told_to_stop(
  serve_config, run_endpoint
):
  with run_endpoint(serve_config()) as server:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
      body = {**LONG, 'max_tokens': 500}
      answer = pool.submit(httpx.post, f'{server.url}/completions', json=body, timeout=30)
      wait_for(lambda: server.bridge.in_flight == 1)
      server.endpoint.stop()
      assert len(answer.result().json()['choices'][0]['token_ids']) == 500
    server.thread.join(20)
    assert not server.errors
    with pytest.raises(httpx.ConnectError):
      httpx.get(server.url)


def test_broken_weights_are_an_error_and_a_dead_engine_ends_the_server(
  serve_config, run_endpoint, long_model
):
  with run_endpoint(serve_config()) as server:
    broken = jax.tree.map(lambda x: x * np.nan, load_model(long_model).params)
    server.bridge.swap_params(broken, 1)
    for stream in (False, True):  # a number that is no number cannot be told, and is not invented
      body = {**SHORT, 'stream': stream}
      answer = httpx.post(f'{server.url}/completions', json=body, timeout=30)
      text = answer.text.removeprefix('data: ').split('\n')[0]
      assert json.loads(text)['error']['code'] == 'internal'
      assert answer.status_code == (200 if stream else 500)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
      answer = pool.submit(httpx.post, f'{server.url}/completions', json=LONG, timeout=30)
      wait_for(lambda: server.bridge.in_flight == 1)
      server.bridge.swap_params({'not': 'weights'}, 2)
      assert error_of(answer.result(), 503)['code'] == 'engine_stopped'
    server.thread.join(20)
    assert [type(error) for error in server.errors] == [FleetError]
