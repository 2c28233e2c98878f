"""`plain`: why one machine does not hear or believe another, in words for people."""

from __future__ import annotations

import errno
import socket
import ssl

ELSEWHERE = 62, 64
"""OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH."""
_SYSTEM = {
    errno.ECONNREFUSED: "nobody listens there",
    errno.ECONNRESET: "the other end has closed the connection",
    errno.EPIPE: "the other end has closed the connection",
    errno.EHOSTUNREACH: "no way leads there from this machine, or no machine has that address",
    errno.ENETUNREACH: "no way leads there from this machine",
    errno.EINVAL: "no way leads there from the address that this end takes",
    errno.ETIMEDOUT: "no answer: no machine has that address, or a firewall keeps the answer away",
    errno.EADDRNOTAVAIL: "this machine has no such address",
    errno.EADDRINUSE: "another process listens there",
    errno.EACCES: "the system does not allow it; a port below 1024 is root's, or a firewall refuses",
}
_UNKNOWN_NAME = "nobody knows this name; mend its spelling, or give an IP address"
_EXPIRED = "has expired, by this machine's clock; renew it with `llamarl certs`"
_FOREIGN = "is of another authority than ca.crt here; both ends need files of one folder that `llamarl certs` made"
_NO_NAME = "does not have the name or address under which it was called; `llamarl certs` makes one that has"
_CERTIFICATE = {
    7: _FOREIGN, 18: _FOREIGN, 19: _FOREIGN, 20: _FOREIGN, 21: _FOREIGN,
    9: "is not valid yet, by this machine's clock; set the clocks alike",
    10: _EXPIRED,
    **dict.fromkeys(ELSEWHERE, _NO_NAME),
}  # fmt: skip
"""Faults of a certificate, by number: OpenSSL's X509_V_ERR_*."""
_SAID = {
    "ALERT_UNKNOWN_CA": "this end's certificate is of another authority than ca.crt there",
    "ALERT_DECRYPT_ERROR": "this end's certificate is of another authority than ca.crt there",
    "ALERT_CERTIFICATE_EXPIRED": "this end's certificate has expired, by the clock there",
    "ALERT_BAD_CERTIFICATE": "this end's certificate does not do there",
    "ALERT_CERTIFICATE_UNKNOWN": "this end's certificate does not do there",
    "CERTIFICATE_REQUIRED": "the other end wants a certificate, and got none",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it shows no certificate",
    "HTTP_REQUEST": "it speaks HTTP, not TLS",
    "WRONG_VERSION_NUMBER": "it does not speak TLS",
    "UNSUPPORTED_PROTOCOL": "it speaks an older TLS than 1.3",
}
"""Faults of a handshake: parts of OpenSSL's reasons, and words for them."""


def plain(error: BaseException) -> str:
    """Reason for people; the system's own text alone where nothing is known of it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        known = _CERTIFICATE.get(error.verify_code)
        return f"its certificate {known}" if known else f"its certificate does not do: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        reason = getattr(error, "reason", None) or str(error)
        return next((text for part, text in _SAID.items() if part in reason), f"no agreement by TLS: {reason}")
    if isinstance(error, socket.gaierror):
        return _UNKNOWN_NAME
    if isinstance(error, TimeoutError) and not str(error):
        return _SYSTEM[errno.ETIMEDOUT]
    if isinstance(error, OSError) and error.errno is not None:
        return _SYSTEM.get(error.errno) or error.strerror or str(error)
    return str(error) or type(error).__name__
