//! A flame graph: each function is drawn above its caller, and its width is proportional to its
//! number of samples.

use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::{BACKGROUND, GREY, INK, OTHER_COLOURS, TEAL};
use crate::profile::Frame;
use crate::report::numbers::whole;

pub(super) struct Flame<'a> {
    pub(super) title: String,
    pub(super) process: &'a Frame,
}

const WIDTH: u32 = 1_600;
const HEADER: i32 = 56;
const MARGIN: i32 = 12;
/// The height of a frame, in pixels.
const ROW: i32 = 19;
/// The approximate width of a letter in pixels. The exact width depends on the viewer's font.
const LETTER: usize = 7;

impl Flame<'_> {
    pub(super) fn draw(&self, path: &Path) {
        let rows = i32::try_from(self.process.depth()).unwrap();
        let height = HEADER + rows * ROW + MARGIN;
        let size = (WIDTH, u32::try_from(height).unwrap());
        let root = SVGBackend::new(path, size).into_drawing_area();
        root.fill(&BACKGROUND).unwrap();
        super::title(&root, &self.title);
        let canvas = Canvas {
            root: &root,
            samples: self.process.samples as f64,
        };
        let (mut left, bottom) = (f64::from(MARGIN), height - MARGIN);
        canvas.frame(self.process, left, bottom, GREY);
        // All frames of a thread have the same colour.
        let colours = [TEAL].into_iter().chain(OTHER_COLOURS).cycle();
        for (thread, colour) in self.process.callees.iter().zip(colours) {
            canvas.tower(thread, left, bottom - ROW, colour);
            left += canvas.width(thread);
        }
        root.present().unwrap();
    }
}

struct Canvas<'a, DB: DrawingBackend> {
    root: &'a DrawingArea<DB, Shift>,
    /// The total number of samples, which the full width represents.
    samples: f64,
}

impl<DB: DrawingBackend> Canvas<'_, DB> {
    fn part(&self, frame: &Frame) -> f64 {
        frame.samples as f64 / self.samples
    }

    fn width(&self, frame: &Frame) -> f64 {
        self.part(frame) * (f64::from(WIDTH) - 2.0 * f64::from(MARGIN))
    }

    /// Draws a frame with all its callees above it.
    fn tower(&self, frame: &Frame, mut left: f64, bottom: i32, colour: RGBColor) {
        self.frame(frame, left, bottom, colour);
        for callee in &frame.callees {
            self.tower(callee, left, bottom - ROW, colour);
            left += self.width(callee);
        }
    }

    fn frame(&self, frame: &Frame, left: f64, bottom: i32, colour: RGBColor) {
        #[expect(clippy::cast_possible_truncation, reason = "pixels of the chart")]
        let [from, to] = [left, left + self.width(frame)].map(|x| x.round() as i32);
        let top = bottom - ROW;
        let shape = Rectangle::new(
            [(from, top + 1), (to - 1, bottom)],
            colour.mix(0.35).filled(),
        );
        self.root.draw(&shape).unwrap();
        let max_letters = usize::try_from(to - from).unwrap_or(0) / LETTER;
        if max_letters < 4 {
            return;
        }
        let mut text = format!("{} {} %", frame.name, whole(100.0 * self.part(frame)));
        if text.chars().count() > max_letters {
            let start = frame.name.chars().take(max_letters - 1);
            text = start.chain(['…']).collect();
        }
        let font = ("sans-serif", 12).into_font().color(&INK);
        let font = font.pos(Pos::new(HPos::Left, VPos::Center));
        self.root
            .draw_text(&text, &font, (from + 3, top + ROW / 2 + 1))
            .unwrap();
    }
}
