"""`plain`: explains errors of connections between machines to users."""

from __future__ import annotations

import errno
import socket
import ssl

ELSEWHERE = 62, 64
"""OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH."""
_SYSTEM = {
    errno.ECONNREFUSED: "no process listens there",
    errno.ECONNRESET: "the other end has closed the connection",
    errno.EPIPE: "the other end has closed the connection",
    errno.EHOSTUNREACH: "this machine has no route there, or no machine has that address",
    errno.ENETUNREACH: "this machine has no route there",
    errno.EINVAL: "there is no route from this end's address",
    errno.ETIMEDOUT: "no answer: no machine has that address, or a firewall drops the answer",
    errno.EADDRNOTAVAIL: "this machine has no such address",
    errno.EADDRINUSE: "another process listens there",
    errno.EACCES: "the system does not allow it: ports below 1024 need root, or a firewall refuses",
}
_UNKNOWN_NAME = "the host name is unknown; correct it, or use an IP address"
_EXPIRED = "has expired by this machine's clock; renew it with `llamarl certs`"
_FOREIGN = (
    "was issued by another authority than this end's ca.crt; both ends need files from one folder of `llamarl certs`"
)
_NO_NAME = "lacks the name or address that this end connected to; create one that has it with `llamarl certs`"
_CERTIFICATE = {
    7: _FOREIGN, 18: _FOREIGN, 19: _FOREIGN, 20: _FOREIGN, 21: _FOREIGN,
    9: "is not valid yet by this machine's clock; synchronize the clocks",
    10: _EXPIRED,
    **dict.fromkeys(ELSEWHERE, _NO_NAME),
}  # fmt: skip
"""Faults of a certificate, by number: OpenSSL's X509_V_ERR_*."""
_SAID = {
    "ALERT_UNKNOWN_CA": "this end's certificate was issued by another authority than the other end's ca.crt",
    "ALERT_DECRYPT_ERROR": "this end's certificate was issued by another authority than the other end's ca.crt",
    "ALERT_CERTIFICATE_EXPIRED": "this end's certificate has expired by the other end's clock",
    "ALERT_BAD_CERTIFICATE": "the other end rejects this end's certificate",
    "ALERT_CERTIFICATE_UNKNOWN": "the other end rejects this end's certificate",
    "CERTIFICATE_REQUIRED": "the other end requires a certificate, and got none",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it sent no certificate",
    "HTTP_REQUEST": "it speaks HTTP, not TLS",
    "WRONG_VERSION_NUMBER": "it does not speak TLS",
    "UNSUPPORTED_PROTOCOL": "it speaks a TLS version below 1.3",
}
"""Faults of a handshake: parts of OpenSSL's reasons, and their explanations."""


def plain(error: BaseException) -> str:
    """Returns the reason for users. An unknown error keeps the system's text."""
    if isinstance(error, ssl.SSLCertVerificationError):
        known = _CERTIFICATE.get(error.verify_code)
        return f"its certificate {known}" if known else f"its certificate is invalid: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        reason = getattr(error, "reason", None) or str(error)
        return next((text for part, text in _SAID.items() if part in reason), f"the TLS handshake failed: {reason}")
    if isinstance(error, socket.gaierror):
        return _UNKNOWN_NAME
    if isinstance(error, TimeoutError) and not str(error):
        return _SYSTEM[errno.ETIMEDOUT]
    if isinstance(error, OSError) and error.errno is not None:
        return _SYSTEM.get(error.errno) or error.strerror or str(error)
    return str(error) or type(error).__name__
