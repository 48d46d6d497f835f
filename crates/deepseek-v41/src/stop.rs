//! Ending a text at a stop string, without ever showing a part of one.

/// Passes text on while holding back what may be the beginning of a stop string.
#[derive(Debug, Clone, Default)]
pub struct StopStrings {
    stops: Vec<String>,
    held: String,
}

/// What became of a piece of text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stopped {
    /// No stop string so far; this much can be shown.
    No(String),
    /// A stop string occurred: the text before it, and which one.
    Yes {
        /// Text in front of the stop string.
        text: String,
        /// The stop string that occurred.
        stop: String,
    },
}

impl StopStrings {
    /// Empty strings are ignored: they would stop everything.
    pub fn new(stops: impl IntoIterator<Item = String>) -> Self {
        Self {
            stops: stops.into_iter().filter(|s| !s.is_empty()).collect(),
            held: String::new(),
        }
    }

    /// Takes the next piece of text. Of several stop strings the one that begins first counts, and
    /// among those the longest.
    pub fn push(&mut self, text: &str) -> Stopped {
        if self.stops.is_empty() {
            return Stopped::No(text.to_owned());
        }
        self.held.push_str(text);
        let found = self
            .stops
            .iter()
            .filter_map(|stop| Some((self.held.find(stop.as_str())?, stop)));
        if let Some((at, stop)) = found.min_by_key(|(at, stop)| (*at, usize::MAX - stop.len())) {
            let stop = stop.clone();
            self.held.truncate(at);
            return Stopped::Yes {
                text: std::mem::take(&mut self.held),
                stop,
            };
        }
        let keep = self.longest_open_end();
        let rest = self.held.split_off(self.held.len() - keep);
        Stopped::No(std::mem::replace(&mut self.held, rest))
    }

    /// The text held back, when no more will come.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Bytes at the end of the text that begin some stop string.
    fn longest_open_end(&self) -> usize {
        let open = |stop: &String| {
            let ends = (1..stop.len()).rev().filter(|n| stop.is_char_boundary(*n));
            ends.into_iter()
                .find(|n| self.held.ends_with(&stop[..*n]))
                .unwrap_or(0)
        };
        self.stops.iter().map(open).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, Option<String>) {
        let mut matcher = StopStrings::new(stops.iter().map(ToString::to_string));
        let mut out = String::new();
        for piece in pieces {
            match matcher.push(piece) {
                Stopped::No(text) => out.push_str(&text),
                Stopped::Yes { text, stop } => {
                    out.push_str(&text);
                    return (out, Some(stop));
                }
            }
        }
        out.push_str(&matcher.finish());
        (out, None)
    }

    #[test]
    fn a_stop_string_is_found_however_the_text_is_cut() {
        let text = "say é\u{300}nough END now";
        for cut in (0..=text.len()).filter(|i| text.is_char_boundary(*i)) {
            let (a, b) = text.split_at(cut);
            assert_eq!(
                run(&["END"], &[a, b]),
                ("say é\u{300}nough ".into(), Some("END".into()))
            );
        }
    }

    #[test]
    fn what_only_looked_like_a_stop_string_is_given_back() {
        assert_eq!(
            run(&["</stop>"], &["a</st", "</s", "x"]),
            ("a</st</sx".into(), None)
        );
        assert_eq!(run(&["abab"], &["aba", "cab"]), ("abacab".into(), None));
        assert_eq!(run(&["ab"], &["xa"]), ("xa".into(), None));
    }

    #[test]
    fn the_first_and_then_the_longest_counts() {
        assert_eq!(
            run(&["b", "abc"], &["xabc"]),
            ("x".into(), Some("abc".into()))
        );
        assert_eq!(run(&["", "c"], &["xabc"]), ("xab".into(), Some("c".into())));
        assert_eq!(
            run(&["ab", "abc"], &["xabc"]),
            ("x".into(), Some("abc".into()))
        );
    }
}
