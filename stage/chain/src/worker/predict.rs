//! Sampling on the last stage.

use splitmodel_link::frame::{ErrorClass, Frame, Prediction, Report, Row, prediction_flags, row_flags};
use splitmodel_sampling::SamplingError;

use super::{Worker, digest};
use crate::runtime::Runtime;
use crate::schedule::LoggedLogits;

impl<R: Runtime> Worker<R> {
    /// Samples the wanted rows of the last computation, in row order.
    pub(super) fn predict(&mut self, frame: &Frame, reports: &mut Vec<Report>) -> Vec<Prediction> {
        let mut records = Vec::with_capacity(frame.rows.iter().filter(|r| r.has(row_flags::WANT)).count());
        let mut logged = Vec::new();
        let mut at = 0;
        for (i, row) in frame.rows.iter().enumerate() {
            let computed = self.batch.index.get(at) == Some(&i);
            let mut prediction = dropped(row);
            if computed {
                match self.predict_row(row, at) {
                    Ok(Some(p)) => prediction = p,
                    Ok(None) => {}
                    Err((class, message)) => {
                        let record = u32::try_from(i).ok();
                        reports.push(self.report(class, record, row.session, message));
                    }
                }
                if row.has(row_flags::WANT) && self.sink.is_some() {
                    logged.extend(self.log_logits(at, prediction.token));
                }
                at += 1;
            }
            if row.has(row_flags::WANT) {
                records.push(prediction);
            }
        }
        if self.sink.is_some() && !self.batch.index.is_empty() {
            let op = self.decode_op(frame, logged);
            self.log(|| op);
        }
        records
    }

    fn predict_row(&mut self, row: &Row, at: usize) -> Result<Option<Prediction>, (ErrorClass, String)> {
        let want = row.has(row_flags::WANT);
        let state = self.lanes.get_mut(usize::from(row.lane)).and_then(Option::as_mut);
        let Some(sampler) = state.and_then(|s| s.sampler.as_mut()) else {
            let missing = || (ErrorClass::Backend, "no generation config came before the row".to_owned());
            return if want { Err(missing()) } else { Ok(None) };
        };
        sampler.commit(row.position, row.token).map_err(refused)?;
        if !want {
            return Ok(None);
        }
        let logits = self.runtime.logits(at).map_err(|e| (ErrorClass::Backend, e.to_string()))?;
        let s = sampler.sample(row.position, logits, row.has(row_flags::LOGPROBS)).map_err(refused)?;
        Ok(Some(Prediction {
            token: s.token,
            logprob: s.logprob,
            entropy: s.entropy,
            margin: s.margin,
            flags: if s.grammar_end { prediction_flags::GRAMMAR_END } else { 0 },
            top: s.top,
            ..dropped(row)
        }))
    }

    fn log_logits(&self, at: usize, token: i32) -> Option<LoggedLogits> {
        let logits = self.runtime.logits(at).ok()?;
        let full = self.sink.as_ref().is_some_and(|s| s.full_logits());
        Some(LoggedLogits {
            row: at,
            digest: digest(logits),
            nan: logits.iter().any(|l| l.is_nan()),
            token,
            logits: full.then(|| logits.to_vec()),
        })
    }
}

/// Class and words of a sampler's error. What the request itself brought about would come again with every attempt.
fn refused(error: SamplingError) -> (ErrorClass, String) {
    let class = match error {
        SamplingError::NothingAllowed { .. }
        | SamplingError::BiasOutsideVocabulary { .. }
        | SamplingError::GrammarFailed { .. } => ErrorClass::InvalidRequest,
        _ => ErrorClass::Backend,
    };
    (class, error.to_string())
}

fn dropped(row: &Row) -> Prediction {
    Prediction {
        session: row.session,
        epoch: row.epoch,
        ordinal: row.ordinal,
        position: row.position,
        token: -1,
        logprob: f32::NAN,
        entropy: f32::NAN,
        margin: f32::NAN,
        mu: f32::NAN,
        draws: 0,
        flags: prediction_flags::DROPPED,
        top: Vec::new(),
    }
}
