//! The one error type of model files: which file, which field, what was found, what is supported.

use std::path::Path;

use suanpan_base::BadArgument;

/// Why a model was refused. Nothing is half loaded: an error leaves no model behind.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The operating system refused to open or read a file.
    #[error("{file}: {source}")]
    Io {
        /// The file or folder.
        file: String,
        /// The system's own words.
        source: std::io::Error,
    },
    /// A field of a file holds something that is damaged or not supported.
    #[error("{file}: {field}: found {found}; supported: {supported}")]
    BadField {
        /// The file.
        file: String,
        /// Header field, metadata key, JSON key or tensor name.
        field: String,
        /// What the file says.
        found: String,
        /// What would have been accepted.
        supported: String,
    },
    /// Something the model cannot do without is not there.
    #[error("{file}: {field} is missing; needed: {needed}")]
    Missing {
        /// The file or folder that should have held it.
        file: String,
        /// Metadata key, JSON key, tensor name or file name.
        field: String,
        /// Why it is needed, or where it was expected.
        needed: String,
    },
    /// The model's name on the command line or in a request cannot be read.
    #[error("model {spec:?}: {found}; supported: {supported}")]
    BadSpec {
        /// The name as given.
        spec: String,
        /// What is wrong with it.
        found: String,
        /// The forms that are accepted.
        supported: String,
    },
    /// Fetching from a model hub failed.
    #[error("hf:{repo}: {file}: {message}")]
    Hub {
        /// `owner/name`.
        repo: String,
        /// The file that was asked for.
        file: String,
        /// What went wrong.
        message: String,
    },
    /// The tokenizer or its file is damaged or of an unsupported kind.
    #[error("{file}: tokenizer: {message}")]
    Tokenizer {
        /// The file.
        file: String,
        /// What is wrong, and what is supported.
        message: String,
    },
    /// The chat template does not compile.
    #[error("{file}: chat template: {message}")]
    Template {
        /// The file.
        file: String,
        /// What is wrong.
        message: String,
    },
    /// An argument of a call cannot be honoured.
    #[error(transparent)]
    Argument(#[from] BadArgument),
}

impl ModelError {
    /// A field that holds `found` where only `supported` is accepted.
    pub fn bad(
        file: impl Into<String>,
        field: impl Into<String>,
        found: impl std::fmt::Display,
        supported: impl std::fmt::Display,
    ) -> Self {
        ModelError::BadField {
            file: file.into(),
            field: field.into(),
            found: found.to_string(),
            supported: supported.to_string(),
        }
    }

    /// A field, tensor or file that is not there.
    pub fn missing(
        file: impl Into<String>,
        field: impl Into<String>,
        needed: impl std::fmt::Display,
    ) -> Self {
        ModelError::Missing { file: file.into(), field: field.into(), needed: needed.to_string() }
    }

    /// A failure of the operating system on `path`.
    pub fn io(path: &Path, source: std::io::Error) -> Self {
        ModelError::Io { file: path.display().to_string(), source }
    }

    /// The field at fault, where the error has one.
    pub fn field(&self) -> Option<&str> {
        match self {
            ModelError::BadField { field, .. } | ModelError::Missing { field, .. } => Some(field),
            ModelError::Argument(e) => Some(&e.field),
            _ => None,
        }
    }
}
