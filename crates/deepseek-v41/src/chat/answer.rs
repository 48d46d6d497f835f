//! A whole answer.

use deepseek_recipe::stream::{CompletionUsage, FinishReason, OutputChunk};

/// What the chunks of one answer add up to.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Answer {
    /// The reasoning; empty without thinking.
    pub reasoning: String,
    /// The text for the user.
    pub content: String,
    /// Tool calls in order.
    pub tool_calls: Vec<CalledTool>,
    /// Why it ended; `None` while it goes on.
    pub finish_reason: Option<FinishReason>,
    /// The stop sequence that ended it.
    pub stop_sequence: Option<String>,
    /// Tokens it took.
    pub usage: CompletionUsage,
}

/// One tool call.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CalledTool {
    /// The tool; empty when the answer ended before its name did.
    pub name: String,
    /// A JSON object, unless the answer ended inside.
    pub arguments: String,
}

impl Answer {
    /// Adds the next chunk.
    pub fn add(&mut self, chunk: &OutputChunk) {
        match chunk {
            OutputChunk::Start { .. } => {}
            OutputChunk::Content { content, .. } => self.content.push_str(content),
            OutputChunk::Reasoning { content, .. } => self.reasoning.push_str(content),
            OutputChunk::ToolCallBegin => self.tool_calls.push(CalledTool::default()),
            OutputChunk::ToolCallNamed { tool_name } => {
                if let Some(call) = self.tool_calls.last_mut() {
                    call.name.clone_from(tool_name);
                }
            }
            OutputChunk::ToolCallArgumentsDelta { arguments } => {
                if let Some(call) = self.tool_calls.last_mut() {
                    call.arguments.push_str(arguments);
                }
            }
            OutputChunk::Finish {
                finish_reason,
                stop_sequence,
                completion_usage,
            } => {
                self.finish_reason = Some(*finish_reason);
                self.stop_sequence.clone_from(stop_sequence);
                self.usage = *completion_usage;
            }
        }
    }
}

impl<'a> Extend<&'a OutputChunk> for Answer {
    fn extend<T: IntoIterator<Item = &'a OutputChunk>>(&mut self, chunks: T) {
        chunks.into_iter().for_each(|chunk| self.add(chunk));
    }
}
