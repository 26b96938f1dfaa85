"""Measures, simulates, chooses members, trees and flush lengths. Answers no request."""
