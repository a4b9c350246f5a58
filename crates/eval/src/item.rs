//! What passes between a task, an endpoint and a scorer: a question with everything that is known about it, and an answer with
//! everything that was seen of it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Which question: enough to build it again, byte for byte, with the pack's seed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Cell {
    /// Name of the task, with its options: `niah_multikey_2`, `needle_grid:depth=25`.
    pub task: String,
    /// Prompt and answer together, in tokens of the counter.
    pub length_tokens: usize,
    /// Sample, from 0.
    pub index: u32,
    /// How much of the context the model is given.
    pub view: View,
}

/// How much of the context a question shows: what is lost between them is knowledge, skill and length, apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum View {
    /// No context: what the model answers anyway.
    ClosedBook,
    /// Only what the answer needs.
    Focused,
    /// All of it.
    #[default]
    Full,
}

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Instructions.
    System,
    /// The questioner.
    User,
    /// The model, in a transcript that the question shows.
    Assistant,
    /// The result of a tool call.
    Tool,
}

/// A piece of a turn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "type")]
pub enum Part {
    /// Text.
    Text {
        /// The text.
        text: String,
    },
    /// A picture, encoded.
    Image {
        /// `image/png`.
        mime: String,
        /// The file's bytes.
        #[serde(skip)]
        bytes: Vec<u8>,
        /// Seconds from the start, where it is a frame of a video.
        at_seconds: Option<f64>,
    },
}

/// A call of a tool, as a transcript shows it or a model makes it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ToolCall {
    /// Identifier that the result refers to.
    pub id: String,
    /// Name of the function.
    pub name: String,
    /// Arguments as sent: JSON text, which need not parse.
    pub arguments: String,
}

/// One turn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Turn {
    /// Who speaks.
    pub role: Role,
    /// What is said or shown, in order.
    pub parts: Vec<Part>,
    /// Calls that an assistant's turn makes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// The call that a tool's turn answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
}

impl Turn {
    /// A turn of plain text.
    pub fn text(role: Role, text: impl Into<String>) -> Self {
        Turn {
            role,
            parts: vec![Part::Text { text: text.into() }],
            tool_calls: Vec::new(),
            tool_call_id: None,
        }
    }
}

/// What is sent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Prompt {
    /// The turns, in order. The raw protocol (base models) sends their text, one after another, and then the lead-in.
    pub turns: Vec<Turn>,
    /// The start of the answer, for the raw protocol; a chat leaves it out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lead_in: Option<String>,
    /// Tools on offer: OpenAI function objects.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tools: Vec<serde_json::Value>,
}

/// A piece of the context that the answer needs, or that stands there to mislead. Offsets are bytes in the concatenated text of the turns.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fact {
    /// First byte.
    pub start_byte: usize,
    /// One past the last.
    pub end_byte: usize,
    /// True depth after insertion, 0 (start of the context) ..= 1.
    pub depth: f64,
    /// The answer needs it.
    pub needed: bool,
}

/// A question, whole.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Item {
    /// Which.
    pub cell: Cell,
    /// What is sent first.
    pub prompt: Prompt,
    /// Tokens that the answer may take.
    pub answer_tokens: usize,
    /// Tokens of the prompt by the counter, template not included.
    pub prompt_tokens: usize,
    /// Right answers. How they combine (all, any, in order) is the task's.
    pub gold: Vec<String>,
    /// Wrong answers that the context offers: what a guesser draws from and a liar lists.
    pub decoys: Vec<String>,
    /// Where the facts stand.
    pub facts: Vec<Fact>,
    /// Everything else that rebuilds the item and explains it: corpus and hash, units used, options.
    pub recipe: BTreeMap<String, serde_json::Value>,
}

impl Item {
    /// The text of all turns, one after another: what [`Fact`]'s offsets count in.
    pub fn text(&self) -> String {
        let mut all = String::new();
        for part in self.prompt.turns.iter().flat_map(|t| &t.parts) {
            if let Part::Text { text } = part {
                all.push_str(text);
            }
        }
        all
    }
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// The model ended it.
    #[default]
    Stop,
    /// The limit cut it.
    Length,
    /// It ended in tool calls.
    ToolCalls,
    /// A filter or a refusal field of the endpoint.
    Refused,
    /// Anything else the endpoint said, or nothing.
    Other,
}

/// What came back for one request.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// The answer's text, reasoning taken out.
    pub text: String,
    /// The reasoning that the endpoint sent apart, or that stood before the end-of-thinking mark.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reasoning: String,
    /// Tool calls.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// Why it ended.
    pub finish: Finish,
}

/// How an answer failed, where it did: the kinds are counted apart, so that a cut answer never looks like a wrong one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Failure {
    /// Nothing was said.
    Empty,
    /// The limit cut the answer before it was right.
    Cut,
    /// The model declined.
    Refused,
    /// The answer has not the form that was asked.
    Unparsed,
    /// A decoy was chosen.
    Decoy,
    /// A chain was followed, but not to its end, or another hop was named.
    WrongHop,
    /// More was named than asked, with the right ones among them.
    Listed,
    /// Some right ones are missing.
    Partial,
    /// Anything else.
    Wrong,
}

/// A judged answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// As the public evaluation of the same name scores, 0 ..= 1.
    pub compatible: f64,
    /// As it should be scored: whole words, exact sets, nothing for listing everything; 0 ..= 1.
    pub strict: f64,
    /// How it failed, unless strict is 1.
    pub failure: Option<Failure>,
    /// Other numbers of this task: furthest hop, edit similarity.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub detail: BTreeMap<String, f64>,
}
