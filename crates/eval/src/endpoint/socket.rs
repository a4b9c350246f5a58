//! A connection on which every wait has a deadline and every read leaves its time; plain or TLS.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use super::{Fault, FaultKind, Limits};
use crate::EvalError;

/// Most that one read asks of the system.
const READ_BYTES: usize = 64 << 10;

/// A TCP stream with a deadline for everything and a shorter one between reads.
pub struct Timed {
    tcp: TcpStream,
    deadline: Instant,
    idle: Duration,
    last_read: Instant,
}

impl Timed {
    fn left(&self, most: Duration) -> std::io::Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now()).min(most);
        // A timeout of zero would mean none at all.
        if left.is_zero() { Err(std::io::ErrorKind::TimedOut.into()) } else { Ok(left) }
    }
}

/// What the system calls a timeout depends on the system.
fn timed_out(e: std::io::Error) -> std::io::Error {
    if e.kind() == std::io::ErrorKind::WouldBlock { std::io::ErrorKind::TimedOut.into() } else { e }
}

impl Read for Timed {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        self.tcp.set_read_timeout(Some(self.left(self.idle)?))?;
        let n = self.tcp.read(buf).map_err(timed_out)?;
        self.last_read = Instant::now();
        Ok(n)
    }
}

impl Write for Timed {
    fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
        self.tcp.set_write_timeout(Some(self.left(self.idle)?))?;
        self.tcp.write(buf).map_err(timed_out)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.tcp.flush()
    }
}

/// Where an endpoint listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// TLS.
    pub tls: bool,
    /// Host name or address, without brackets.
    pub host: String,
    /// Port.
    pub port: u16,
    /// Path in front of `/v1/…`, without a slash at its end.
    pub path: String,
}

impl Target {
    /// Reads `http(s)://host[:port][/path]`; a `/v1` at the end is left to the routes.
    pub fn parse(url: &str) -> Result<Target, EvalError> {
        let bad =
            |why: &str| EvalError::bad("endpoint", url, format!("http(s)://host[:port][/path] ({why})"));
        let uri: http::Uri = url.parse().map_err(|_| bad("it does not parse"))?;
        let tls = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(bad("no http:// or https://")),
        };
        let authority = uri.authority().ok_or_else(|| bad("no host"))?;
        if authority.as_str().contains('@') || uri.query().is_some() {
            return Err(bad("no user and no query belong here; keys come from the environment"));
        }
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
        if host.is_empty() {
            return Err(bad("no host"));
        }
        let path = uri.path().trim_end_matches('/');
        let path = path.strip_suffix("/v1").unwrap_or(path).to_owned();
        Ok(Target { tls, host, port: authority.port_u16().unwrap_or(if tls { 443 } else { 80 }), path })
    }

    /// The `Host` header.
    pub fn authority(&self) -> String {
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        if self.port == if self.tls { 443 } else { 80 } { host } else { format!("{host}:{}", self.port) }
    }
}

/// TLS settings: the public roots, and those of `ca_file` (PEM) beside them.
pub fn tls_config(ca_file: Option<&Path>) -> Result<Arc<ClientConfig>, EvalError> {
    let mut roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() };
    if let Some(path) = ca_file {
        let file = |why: String| EvalError::File { path: path.display().to_string(), line: 0, why };
        let certs = CertificateDer::pem_file_iter(path).map_err(|e| file(e.to_string()))?;
        for cert in certs {
            let cert = cert.map_err(|e| file(e.to_string()))?;
            roots.add(cert).map_err(|e| file(e.to_string()))?;
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| EvalError::bad("tls", e, "TLS 1.2 and 1.3"))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(Arc::new(config))
}

/// A connection.
pub enum Socket {
    /// Plain.
    Plain(Timed),
    /// TLS.
    Tls(Box<StreamOwned<ClientConnection, Timed>>),
}

fn resolve(target: &Target, within: Duration) -> Result<Vec<SocketAddr>, Fault> {
    let fail = |why: String| Fault::new(FaultKind::Resolve, format!("{}: {why}", target.host));
    let (sender, receiver) = mpsc::channel();
    let (host, port) = (target.host.clone(), target.port);
    // The system's resolver takes no deadline: it waits on a thread of its own, which ends when it does.
    std::thread::spawn(move || {
        let found = (host.as_str(), port).to_socket_addrs().map(Iterator::collect::<Vec<_>>);
        drop(sender.send(found));
    });
    match receiver.recv_timeout(within) {
        Ok(Ok(found)) if !found.is_empty() => Ok(found),
        Ok(Ok(_)) => Err(fail("the name has no address".into())),
        Ok(Err(e)) => Err(fail(format!("the name does not resolve: {e}"))),
        Err(_) => Err(fail(format!("the name did not resolve within {within:?}"))),
    }
}

impl Socket {
    /// Opens a connection within `limits.connect`; the whole exchange ends at `deadline`.
    pub fn open(
        target: &Target,
        tls: Option<&Arc<ClientConfig>>,
        limits: &Limits,
        deadline: Instant,
    ) -> Result<Socket, Fault> {
        let by = deadline.min(Instant::now() + limits.connect);
        let left = || by.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let mut last = None;
        let mut tcp = None;
        for address in resolve(target, left())? {
            match TcpStream::connect_timeout(&address, left()) {
                Ok(stream) => {
                    tcp = Some(stream);
                    break;
                }
                Err(e) => last = Some((address, e)),
            }
        }
        let Some(tcp) = tcp else {
            let why = last.map_or("no address".into(), |(a, e)| format!("{a}: {e}"));
            return Err(Fault::new(FaultKind::Connect, format!("cannot connect to {why}")));
        };
        // Small writes must not wait for each other, or the head would arrive late.
        drop(tcp.set_nodelay(true));
        let mut timed = Timed { tcp, deadline: by, idle: limits.connect, last_read: Instant::now() };
        let Some(config) = tls else {
            (timed.deadline, timed.idle) = (deadline, limits.idle);
            return Ok(Socket::Plain(timed));
        };
        let fail = |e: String| Fault::new(FaultKind::Tls, format!("TLS with {}: {e}", target.authority()));
        let name = ServerName::try_from(target.host.clone()).map_err(|e| fail(e.to_string()))?;
        let session = ClientConnection::new(Arc::clone(config), name).map_err(|e| fail(e.to_string()))?;
        let mut stream = StreamOwned::new(session, timed);
        while stream.conn.is_handshaking() {
            stream.conn.complete_io(&mut stream.sock).map_err(|e| fail(e.to_string()))?;
        }
        (stream.sock.deadline, stream.sock.idle) = (deadline, limits.idle);
        Ok(Socket::Tls(Box::new(stream)))
    }

    fn timed(&self) -> &Timed {
        match self {
            Socket::Plain(t) => t,
            Socket::Tls(s) => &s.sock,
        }
    }

    /// When the last bytes were read from the system.
    pub fn last_read(&self) -> Instant {
        self.timed().last_read
    }

    /// Which wait a timeout was.
    pub fn waited_for(&self, limits: &Limits) -> String {
        if Instant::now() >= self.timed().deadline {
            format!("not complete within {:?} (the limit of a request)", limits.total)
        } else {
            format!("nothing came for {:?}", self.timed().idle)
        }
    }

    /// Appends what one read gives to `buf`; 0 at the end.
    pub fn fill(&mut self, buf: &mut Vec<u8>) -> std::io::Result<usize> {
        let at = buf.len();
        buf.resize(at + READ_BYTES, 0);
        let read = match self {
            Socket::Plain(t) => t.read(&mut buf[at..]),
            Socket::Tls(s) => s.read(&mut buf[at..]),
        };
        buf.truncate(at + read.as_ref().map_or(0, |n| *n));
        read
    }

    /// Writes everything.
    pub fn send(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        match self {
            Socket::Plain(t) => t.write_all(bytes),
            Socket::Tls(s) => s.write_all(bytes).and_then(|()| s.flush()),
        }
    }
}
