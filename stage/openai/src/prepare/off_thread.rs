//! Work that takes a while on long inputs, where it holds up nobody.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use tokio::sync::Semaphore;

use crate::app::App;
use crate::error::ApiError;

/// Tells work whether anyone still waits for it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Asker(Arc<AtomicBool>);

impl Asker {
    /// An error, which nobody will see, once the client has gone.
    pub(crate) fn waits(&self) -> Result<(), ApiError> {
        if self.0.load(Relaxed) {
            return Err(ApiError::internal("The client has gone."));
        }
        Ok(())
    }
}

/// Dropped together with the request's future.
struct Waiting(Asker);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.0.store(true, Relaxed);
    }
}

/// Runs `work` on a thread for it, after those that came before where all of `places` are taken.
pub(crate) async fn off_thread<T: Send + 'static>(
    app: &Arc<App>,
    places: &Arc<Semaphore>,
    work: impl FnOnce(&App, &Asker) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let failed = || ApiError::internal("The request could not be prepared. Try again.");
    let place = places.clone().acquire_owned().await.map_err(|_| failed())?;
    let (app, span, asker) = (app.clone(), tracing::Span::current(), Asker::default());
    let _waiting = Waiting(asker.clone());
    let done = tokio::task::spawn_blocking(move || {
        // Held to the end even if the client has gone: what counts is who works.
        let _place = place;
        span.in_scope(|| asker.waits().and_then(|()| work(&app, &asker)))
    });
    done.await.map_err(|_| failed())?
}
