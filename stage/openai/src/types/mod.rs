//! Requests and responses as OpenAI's API has them, and the checks that every field passes before any work is done.

pub(crate) mod chat;
pub(crate) mod common;
pub(crate) mod completion;
pub(crate) mod response;

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::error::ApiError;

/// Reads `T` from a request body; the error names the field. Fields that `T` does not know are skipped.
pub(crate) fn read<T: DeserializeOwned>(body: &Value) -> Result<T, ApiError> {
    serde_path_to_error::deserialize(body).map_err(|error| {
        let path = error.path().to_string();
        let reason = error.into_inner().to_string();
        // A missing field is reported at its parent; its name is in the message.
        match reason.strip_prefix("missing field `").and_then(|r| r.split('`').next()) {
            Some(field) if path == "." => ApiError::invalid(field, format!("`{field}` is required.")),
            Some(field) => ApiError::invalid(format!("{path}.{field}"), format!("`{path}.{field}` is required.")),
            None => ApiError::invalid(path.as_str(), format!("`{path}`: {reason}.")),
        }
    })
}

/// Refuses fields that would change the answer and are not served here. Null and absent are the same.
pub(crate) fn refuse(body: &Value, fields: &[&'static str]) -> Result<(), ApiError> {
    match fields.iter().find(|f| body.get(**f).is_some_and(|v| !v.is_null())) {
        Some(field) => Err(ApiError::unsupported(*field, format!("`{field}` is not supported by this server."))),
        None => Ok(()),
    }
}
