//! How thoroughly to reason.

use std::{fmt, str::FromStr};

use deepseek_recipe_core::conversation::ReasoningEffort;

use super::ChatError;

/// How thoroughly to reason: a whole number from 1 to 100, the number the prompt states.
///
/// ```
/// use deepseek_v41::chat::{Effort, EffortNames};
///
/// # fn main() -> Result<(), deepseek_v41::chat::ChatError> {
/// assert_eq!("low".parse::<Effort>()?.level(), 50);
/// assert_eq!("42".parse::<Effort>()?.level(), 42);
/// assert_eq!(EffortNames::Newer.effort("low")?.level(), 25);
/// assert!(Effort::new(0).is_err());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Effort(u8);

/// What the names of efforts stand for. There are two answers in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EffortNames {
    /// The publisher's: low 50, high 75, xhigh 75, max 100.
    #[default]
    Publisher,
    /// That of other servers: low 25, high 50, xhigh 75, max 100.
    Newer,
}

impl EffortNames {
    /// Names and levels, ascending.
    pub fn table(self) -> [(&'static str, u8); 4] {
        match self {
            Self::Publisher => [("low", 50), ("high", 75), ("xhigh", 75), ("max", 100)],
            Self::Newer => [("low", 25), ("high", 50), ("xhigh", 75), ("max", 100)],
        }
    }

    /// The effort of a name.
    ///
    /// # Errors
    /// [`ChatError::Effort`] for another name.
    pub fn effort(self, name: &str) -> Result<Effort, ChatError> {
        let found = self.table().into_iter().find(|(known, _)| *known == name);
        found
            .map(|(_, level)| Effort(level))
            .ok_or_else(|| refused(format!("{name:?}")))
    }

    /// The effort a JSON value names: a name or a whole number, and not a boolean or a fraction.
    ///
    /// # Errors
    /// [`ChatError::Effort`] for anything else.
    pub fn from_json(self, value: &serde_json::Value) -> Result<Effort, ChatError> {
        match value {
            serde_json::Value::String(name) => self.effort(name),
            serde_json::Value::Number(n) => match n.as_i64() {
                Some(level) => Effort::new(level),
                None => Err(refused(n.to_string())),
            },
            other => Err(refused(other.to_string())),
        }
    }
}

impl Effort {
    /// An effort of this level.
    ///
    /// # Errors
    /// [`ChatError::Effort`] outside of 1..=100.
    pub fn new(level: i64) -> Result<Self, ChatError> {
        match u8::try_from(level) {
            Ok(level @ 1..=100) => Ok(Self(level)),
            _ => Err(refused(level.to_string())),
        }
    }

    /// The number the prompt states.
    pub fn level(self) -> u8 {
        self.0
    }
}

/// The level the vendor's library renders for an effort it knows by name.
pub(super) fn rendered_level(effort: Option<ReasoningEffort>) -> u8 {
    match effort {
        Some(ReasoningEffort::Low) => 50,
        None | Some(ReasoningEffort::High | ReasoningEffort::Xhigh) => 75,
        Some(ReasoningEffort::Max) => 100,
    }
}

/// The publisher's `high`, which is what is meant when nothing is said.
impl Default for Effort {
    fn default() -> Self {
        Self(75)
    }
}

impl fmt::Display for Effort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A number, or one of the publisher's names.
impl FromStr for Effort {
    type Err = ChatError;

    fn from_str(text: &str) -> Result<Self, ChatError> {
        match text.parse::<i64>() {
            Ok(level) => Self::new(level),
            Err(_) => EffortNames::Publisher.effort(text),
        }
    }
}

fn refused(found: String) -> ChatError {
    let names = EffortNames::default()
        .table()
        .map(|(name, _)| name)
        .join(", ");
    ChatError::Effort { found, names }
}
