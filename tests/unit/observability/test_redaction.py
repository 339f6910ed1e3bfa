from __future__ import annotations

import pytest

from sidecar.observability.redaction import redacted


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("Incorrect API key: Bearer HSECRET-123", "HSECRET"),
        ('{"error":"authorization: Basic dXNlcjpwYXNz"}', "dXNlcjpwYXNz"),
        ("api_key=abcdef0123 is wrong", "abcdef0123"),
        ('{"api-key": "abcdef0123"}', "abcdef0123"),
        ("use sk-proj-0123456789abcdef", "0123456789abcdef"),
        ("cookie: session=deadbeef", "deadbeef"),
        ('{"msg":"bad","input":{"messages":[{"content":"my secret prompt"}]}}', "secret prompt"),
        ("1 validation error: {'type': 'missing', 'input': 'my secret prompt'}", "secret prompt"),
        ("cannot load data:image/png;base64,iVBORw0KGgoAAAANSUhEUg", "iVBORw0KGgo"),
        (r'{"message":"{\"input\":\"PROMPT\"}"}', "PROMPT"),
        (r'{"message":"{\"api_key\": \"KEY\"}"}', "KEY"),
        ('{"prompt": "PROMPT", "x": 1}', "PROMPT"),
        ('{"messages": [{"role": "user"}]}', "role"),
        ("Authorization: TOKEN", "TOKEN"),
        ("x-api-key KEY", "KEY"),
        ('{"x-api-key": ["KEY"]}', "KEY"),
        ('{"password":"abc TAIL"}', "TAIL"),
        ("Cookie: a=1; session=LATER", "LATER"),
        ("cannot load http://user:PW@host/?X-Amz-Signature=SIG", "PW"),
        ("cannot load http://user:PW@host/?X-Amz-Signature=SIG", "SIG"),
        (r"data:image\/png;base64,iVBORw0KGgo", "iVBOR"),
        ("x" * 500 + " Bearer HSECRETHSECRETHSECRET", "HSEC"),
    ],
)
def test_credentials_prompts_and_media_stay_out(text: str, secret: str) -> None:
    """What an upstream repeats of the client's request does not reach the log."""
    assert secret not in redacted(text)


def test_what_helps_an_operator_stays() -> None:
    """Type, message and code of an error are readable."""
    text = '{"error":{"message":"The model `m` does not exist.","type":"NotFoundError","code":404}}'
    assert redacted(text) == text


def test_it_is_bounded_and_on_one_line() -> None:
    """At most 512 characters, and no control character."""
    assert len(redacted("x" * 100_000)) == 512
    assert redacted("a\nb\x1b[2J") == "a\\nb\\x1b[2J"
