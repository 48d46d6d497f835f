//! Text that follows a JSON schema or a grammar, through `llguidance`.
//!
//! A [`Grammar`] is compiled once for a tokenizer; every text gets a [`GrammarHook`] of its own, which
//! rules out, before each token is chosen, those that could not be continued to a valid text.

use std::{fmt, sync::Arc};

use deepseek_v41_core::{Error, Result};
use llguidance::{
    Matcher, ParserFactory,
    api::TopLevelGrammar,
    toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie},
};

use crate::{DeepSeekV41, sampling::LogitsHook};

/// Byte in front of a control token's bytes: such a token can match no text.
const CONTROL: u8 = 0xff;

/// A grammar compiled for one model's tokens.
#[derive(Clone)]
pub struct Grammar {
    factory: Arc<ParserFactory>,
    grammar: TopLevelGrammar,
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammar").finish_non_exhaustive()
    }
}

impl Grammar {
    /// Texts that are JSON values of this schema.
    ///
    /// # Errors
    /// [`Error::Value`] for a schema that cannot be compiled.
    pub fn json_schema(model: &DeepSeekV41, schema: serde_json::Value) -> Result<Self> {
        Self::new(model, TopLevelGrammar::from_json_schema(schema))
    }

    /// Texts of a grammar in the Lark dialect of `llguidance`.
    ///
    /// # Errors
    /// As [`Grammar::json_schema`].
    pub fn lark(model: &DeepSeekV41, grammar: String) -> Result<Self> {
        Self::new(model, TopLevelGrammar::from_lark(grammar))
    }

    fn new(model: &DeepSeekV41, grammar: TopLevelGrammar) -> Result<Self> {
        let factory = ParserFactory::new_simple(&token_env(model)?).map_err(invalid)?;
        let grammar = Self {
            factory: Arc::new(factory),
            grammar,
        };
        // Compiled here once to report what is wrong with it before a text begins.
        grammar.hook()?;
        Ok(grammar)
    }

    /// The constraint of one text.
    ///
    /// # Errors
    /// None after [`Grammar::json_schema`] or [`Grammar::lark`] succeeded.
    pub fn hook(&self) -> Result<GrammarHook> {
        let parser = self
            .factory
            .create_parser(self.grammar.clone())
            .map_err(invalid)?;
        Ok(GrammarHook {
            matcher: Matcher::new(Ok(parser)),
            consumed: Vec::new(),
        })
    }
}

/// The tokens as bytes. Control tokens are marked as matching no text; the end-of-text token is known
/// to the engine, which allows it where a text may end.
fn token_env(model: &DeepSeekV41) -> Result<TokEnv> {
    let tokenizer = model.tokenizer();
    // Logits may be wider than the tokenizer: ids it does not know are ruled out.
    let vocab = model.config().vocab_size;
    let mut words = Vec::with_capacity(vocab);
    for id in 0..vocab as u32 {
        let mut bytes = Vec::new();
        match tokenizer.token(id) {
            Some(_) if !tokenizer.is_special(id) => tokenizer.token_bytes(id, &mut bytes)?,
            name => {
                bytes.push(CONTROL);
                bytes.extend(
                    name.unwrap_or_else(|| format!("<unused {id}>"))
                        .into_bytes(),
                );
            }
        }
        words.push(bytes);
    }
    let info = TokRxInfo::new(vocab as u32, model.special_ids().eos);
    Ok(Arc::new(ApproximateTokEnv::new(TokTrie::from(
        &info, &words,
    ))))
}

fn invalid(err: impl fmt::Display) -> Error {
    Error::value("grammar", err.to_string())
}

/// The constraint of one text: add it to the generation's sampler.
///
/// It follows the text it is shown, also back: guesses that are not kept are taken back.
pub struct GrammarHook {
    matcher: Matcher,
    consumed: Vec<u32>,
}

impl fmt::Debug for GrammarHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarHook")
            .field("consumed", &self.consumed.len())
            .finish_non_exhaustive()
    }
}

impl GrammarHook {
    /// Brings the matcher to the state after `generated`.
    fn follow(&mut self, generated: &[u32]) -> Result<()> {
        let same = self
            .consumed
            .iter()
            .zip(generated)
            .take_while(|(a, b)| a == b)
            .count();
        if same < self.consumed.len() {
            self.matcher
                .rollback(self.consumed.len() - same)
                .map_err(invalid)?;
            self.consumed.truncate(same);
        }
        for &token in &generated[same..] {
            self.matcher.consume_token(token).map_err(invalid)?;
            self.consumed.push(token);
        }
        Ok(())
    }
}

impl LogitsHook for GrammarHook {
    fn edit(&mut self, generated: &[u32], logits: &mut [f32]) -> Result<()> {
        self.follow(generated)?;
        let mask = self.matcher.compute_mask_or_eos().map_err(invalid)?;
        for (token, logit) in logits.iter_mut().enumerate() {
            if !mask.is_allowed(token as u32) {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }
}
