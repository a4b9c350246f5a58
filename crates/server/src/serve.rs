//! The listening loop: connections in, a bounded time for each head, and an end that lets running requests finish.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use suanpan_engine::Shutdown;
use tokio::net::TcpListener;

use crate::app::App;
use crate::routes::router;

/// A connection that sends no complete request head within this time is closed.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest request head, in bytes.
const HEAD_BYTES: usize = 64 << 10;
/// Pause after the system refused a connection (out of descriptors), so that the loop does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// How a server came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Every running request finished.
    Drained,
    /// The time to drain ran out; the rest was aborted.
    TimedOut,
}

/// Listens on `host:port` (port 0: any free one), tells `ready` the address, and serves until SIGINT or SIGTERM. A second
/// signal ends the process at once. Blocks; the HTTP side runs on two threads of its own.
pub fn run_until_signal(
    host: &str,
    port: u16,
    app: App,
    ready: impl FnOnce(SocketAddr),
) -> io::Result<Ending> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let listener = TcpListener::bind((host, port)).await?;
        ready(listener.local_addr()?);
        serve(listener, app, stop_signal()).await
    })
}

async fn stop_signal() {
    signal().await;
    tracing::info!("stopping: running requests may finish; a second signal ends them now");
    tokio::spawn(async {
        signal().await;
        std::process::exit(130);
    });
}

#[cfg(unix)]
async fn signal() {
    use tokio::signal::unix::{SignalKind, signal};
    match (signal(SignalKind::terminate()), signal(SignalKind::interrupt())) {
        (Ok(mut terminate), Ok(mut interrupt)) => {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        }
        // Without handlers the system's own apply: the process simply ends.
        _ => std::future::pending().await,
    }
}

#[cfg(not(unix))]
async fn signal() {
    if tokio::signal::ctrl_c().await.is_err() {
        std::future::pending().await
    }
}

/// Serves `app` on `listener` until `stop` resolves; then takes no new connection, lets running requests finish within
/// [`crate::ServerOptions::drain`], and aborts what is left. The engine is shut down in both cases.
pub async fn serve(listener: TcpListener, app: App, stop: impl Future<Output = ()>) -> io::Result<Ending> {
    let service = TowerToHyperService::new(router(app.clone()));
    let graceful = GracefulShutdown::new();
    let mut connections = tokio::task::JoinSet::new();
    let mut stop = pin!(stop);
    loop {
        let accepted = tokio::select! {
            () = &mut stop => break,
            // Finished connections are taken off the list.
            Some(_ended) = connections.join_next(), if !connections.is_empty() => continue,
            accepted = listener.accept() => accepted,
        };
        let socket = match accepted {
            Ok((socket, _peer)) => socket,
            Err(error) => {
                tracing::warn!(%error, "a connection was not accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        // Tokens are small packets: they must not wait for each other.
        if let Err(error) = socket.set_nodelay(true) {
            tracing::debug!(%error, "TCP_NODELAY");
        }
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIMEOUT)
            .max_buf_size(HEAD_BYTES)
            .serve_connection(TokioIo::new(socket), service.clone());
        let watched = graceful.watch(connection);
        connections.spawn(async move {
            if let Err(error) = watched.await {
                tracing::debug!(%error, "a connection ended early");
            }
        });
    }
    drop(listener);
    let ending = match tokio::time::timeout(app.options.drain, graceful.shutdown()).await {
        Ok(()) => Ending::Drained,
        Err(_elapsed) => Ending::TimedOut,
    };
    // Dropping a connection drops its requests, and with them their pages.
    connections.shutdown().await;
    // Joining the engine's thread blocks until its step is over.
    let joined = tokio::task::spawn_blocking(move || app.engine.shutdown(Shutdown::Now)).await;
    joined.map(|()| ending).map_err(io::Error::other)
}
